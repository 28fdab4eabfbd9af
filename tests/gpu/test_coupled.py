"""On a CUDA device: losses of the whole batch, and dropout by sample."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import grouped

Batch = dict[str, Tensor]


class Clip(nn.Module):
    def __init__(self, dropout: float = 0.0, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)

        def tower() -> nn.Sequential:
            middle = nn.BatchNorm1d(64) if norm else nn.LayerNorm(64)
            return nn.Sequential(
                nn.Linear(24, 64), middle, nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16)
            )

        self.image, self.text = tower(), tower()
        self.log_scale = nn.Parameter(torch.tensor(1.5))


def encode(model: Clip, micro: Batch) -> tuple[Tensor, Tensor]:
    return model.image(micro["image"]), model.text(micro["text"])


def loss_of(model: Clip, rows: int | None = 7) -> Callable[[Any], wb.Loss]:
    return lambda all: wb.losses.clip_loss(*all, scale=model.log_scale.exp(), rows=rows)


def batch(number: int = 37, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    """On the host, as a loader gives it."""
    made = torch.Generator().manual_seed(seed)
    image, text = torch.randn(2, number, 24, dtype=torch.float64, generator=made).to(dtype)
    return {"image": image, "text": text}


def on_device(data: Batch) -> Batch:
    return {name: leaf.cuda() for name, leaf in data.items()}


def parameters_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double()


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def update(model: nn.Module, step: Callable[[], Any]) -> Tensor:
    before = parameters_of(model)
    step()
    return parameters_of(model) - before


def undivided(model: Clip, data: Batch, *, precision: torch.dtype | None = None) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        with torch.autocast("cuda", dtype=precision or torch.bfloat16, enabled=bool(precision)):
            loss = loss_of(model)(encode(model, on_device(data)))
        (loss.total / loss.units).backward()
        optimizer.step()

    return update(model, step)


def accumulated(model: Clip, data: Batch, micro_batch: int, **options: Any) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    keep = options.pop("keep", 0)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=wb.Coupled(encode, loss_of(model), keep=keep),
        **grouped({"micro_batch": micro_batch, **options}),
    )
    return update(model, lambda: train.step(data))


def test_the_update_is_that_of_the_undivided_batch_in_float64() -> None:
    for norm in (False, True):
        start = Clip(norm=norm).double().cuda()
        right = undivided(copy.deepcopy(start), batch())
        for micro_batch, keep in ((5, 0), (16, 0), (16, 1)):
            made = accumulated(copy.deepcopy(start), batch(), micro_batch, keep=keep)
            assert distance(made, right) <= 1e-12, (norm, micro_batch, keep)


def test_autocast_is_no_further_from_float64_than_the_undivided_batch() -> None:
    right = undivided(Clip().double().cuda(), batch(256))
    data = batch(256, dtype=torch.float32)
    whole = distance(undivided(Clip().cuda(), data, precision=torch.bfloat16), right)
    for keep in (0, 2):
        made = accumulated(Clip().cuda(), data, 48, precision="bf16", keep=keep)
        assert 0 < distance(made, right) <= 1.25 * whole, (keep, whole)


def test_memory_does_not_grow_with_the_batch() -> None:
    """Between 2,048 and 16,384 samples, by no more than what is kept of each and a chunk."""
    peaks = []
    for number in (2048, 16384):
        model = Clip().cuda()
        data = batch(number, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = wb.Coupled(encode, loss_of(model, rows=64))
        train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=1024)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        train.step(data)
        peaks.append(torch.cuda.max_memory_allocated() - base)
        del model, optimizer, loss, train
    # Per sample: two vectors of 16 floats, ten times over (gradients, unit vectors, theirs, and
    # those of a chunk), and 64 rows of similarities with as much again for their gradients.
    per_sample = 2 * 16 * 4 * 10 + 64 * 4 * 6
    assert peaks[1] - peaks[0] <= per_sample * (16384 - 2048), peaks
