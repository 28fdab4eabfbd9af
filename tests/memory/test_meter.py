"""The meter counts storages, each once, from birth to death, in the right category."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.memory.models import loss, mlp, vectors
from wholebatch.memory import MemoryMeter
from wholebatch.memory.meter import peak_with_recordings
from wholebatch.readable_sizes import CATEGORIES

KIB = 1024


def kib(count: int) -> torch.Tensor:
    return torch.zeros(count * KIB, dtype=torch.uint8)


def test_counts_a_storage_once_however_many_views_it_has() -> None:
    with MemoryMeter() as meter:
        whole = kib(8)
        views = [whole[:KIB], whole.view(2, -1), whole.view(-1, KIB)[3]]
        assert meter.current == 8 * KIB
        del whole
        assert meter.current == 8 * KIB, "the views hold the storage"
        del views
        assert meter.current == 0
    assert meter.peak == 8 * KIB


def test_sparse_tensors_count_their_parts() -> None:
    with MemoryMeter() as meter:
        sparse = torch.eye(16).to_sparse()
        assert meter.current == 16 * 4 + 2 * 16 * 8
        del sparse
        assert meter.current == 0


def test_categories_of_a_step() -> None:
    model = mlp(64)
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = sum(p.nbytes for p in model.parameters())
    micro = vectors(512)  # so many that the peak is at the beginning of the backward
    with MemoryMeter(model=model, optimizer=optimizer) as meter:
        total = loss(model, micro).total
        # Saved: ReLU and Tanh outputs, log-softmax; and the loss itself, with the two numbers
        # that cross-entropy keeps.
        held = meter.current - parameters - micro["x"].nbytes - micro["y"].nbytes
        assert held >= 2 * 512 * 64 * 4 + 512 * 5 * 4
        total.backward()
        by_category = meter.current_by_category
        assert by_category["parameters"] == parameters
        assert by_category["gradients"] == parameters
        assert by_category["optimizer state"] == 0
        assert by_category["inputs"] == micro["x"].nbytes + micro["y"].nbytes
        # The peak is in the backward: some activations are gone by then, the first is not.
        assert 512 * 64 * 4 <= meter.peak_by_category["activations"] <= held
        optimizer.step()
        counts = 4 * len(list(model.parameters()))
        assert meter.current_by_category["optimizer state"] == 2 * parameters + counts
        optimizer.zero_grad()
        assert meter.current_by_category["gradients"] == 0
        del total
    assert set(meter.peak_by_category) == set(CATEGORIES)
    assert sum(meter.peak_by_category.values()) == meter.peak


def test_recomputed_activations_are_activations() -> None:
    block = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
    x = torch.randn(32, 8)
    with MemoryMeter(model=block) as meter:
        y = checkpoint(block, x, use_reentrant=False)
        assert meter.current_by_category["activations"] == 0
        y.sum().backward()
    assert meter.peak_by_category["activations"] >= 32 * 512 * 4


def test_buffers_and_marks() -> None:
    model = nn.BatchNorm1d(16)
    with MemoryMeter(model=model) as meter:
        assert meter.current_by_category["buffers"] == 2 * 16 * 4 + 8
        accumulated = torch.zeros(100)
        meter.mark("gradients", [accumulated])
        assert meter.current_by_category["gradients"] == 400
        with pytest.raises(ValueError, match="category='grads': must be one of parameters"):
            meter.mark("grads", [accumulated])


def test_the_peak_remembers_who_was_alive_and_what_it_was_found_to_be_later() -> None:
    weight = torch.zeros(256, requires_grad=True)
    with MemoryMeter() as meter:
        held = kib(4)
        squared = weight.square()  # saved for the backward, which makes it an activation
        total = (squared * squared).sum()
        assert meter.peak >= 5 * KIB
        peak = meter.peak
        del held, squared
        total.backward()
        del total
        kib(1)
    assert meter.peak == peak
    at_peak = meter.peak_by_category
    assert at_peak["activations"] >= KIB
    assert sum(at_peak.values()) == peak


def test_pools_of_recordings_count_with_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(device: int, pool: tuple[int, int], total: int, live: int) -> dict[str, object]:
        sizes = {"total_size": total, "allocated_size": live}
        return {"device": device, "segment_pool_id": pool, **sizes}

    segments = [
        segment(0, (0, 0), 1000, 10),  # the allocator's own: its peak says what was alive in it
        segment(0, (0, 1), 700, 30),
        segment(0, (0, 2), 50, 50),
        segment(1, (0, 1), 9000, 0),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 500)
    assert peak_with_recordings(torch.device("cuda")) == 500 + 670
    assert peak_with_recordings(torch.device("cuda:1")) == 500 + 9000


def test_an_address_used_again_is_another_storage() -> None:
    with MemoryMeter() as meter:
        for _ in range(50):
            kib(64)  # dies at once; the allocator gives the same address again
        assert meter.current == 0
        held = [kib(64) for _ in range(3)]
        assert meter.current == len(held) * 64 * KIB
    assert meter.peak == 3 * 64 * KIB
