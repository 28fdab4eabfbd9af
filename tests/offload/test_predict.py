"""Predicted memory with optimizer state on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support import loss
from wholebatch.errors import OptionError
from wholebatch.memory.make_it_fit import ladder
from wholebatch.memory.predict import predict_peak

WIDTH = 256


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def batch(samples: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, WIDTH), "y": torch.zeros(samples, dtype=torch.long)}


def bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholebatch.offload.partial_step.BUCKET_BYTES", 2 * WIDTH * WIDTH * 4)


def test_optimizer_state_on_the_host_leaves_a_gpu_and_not_a_cpu() -> None:
    model = deep()
    optimizer = torch.optim.AdamW(model.parameters())

    def peak(place: str, device: str) -> dict[str, int]:
        return predict_peak(
            model, loss, batch(4), optimizer=optimizer, optimizer_state=place, device=device
        ).by_category

    plain, host = peak("device", "cuda"), peak("host", "cuda")
    assert plain["optimizer state"] >= 2 * bytes_of(model)
    saved = sum(plain.values()) - sum(host.values())
    few = 3 * 2 * 2 * WIDTH * WIDTH * 4  # two moments of three buckets
    assert 2 * bytes_of(model) - few <= saved <= 3 * bytes_of(model)  # and foreach's copies
    assert peak("host", "cpu") == peak("device", "cpu")
    with pytest.raises(OptionError, match="optimizer_state='disk'"):
        peak("disk", "cpu")


def test_fit_knows_of_it() -> None:
    model = deep()
    optimizer = torch.optim.AdamW(model.parameters())
    as_is = ladder(model, loss, batch(1), budget=2**40, optimizer=optimizer, device="cuda")
    assert as_is[-1].what.endswith("optimizer state on the host")
    assert as_is[-1].peak < as_is[0].peak
    on_cpu = ladder(model, loss, batch(1), budget=2**40, optimizer=optimizer, device="cpu")
    assert not any("host" in rung.what for rung in on_cpu)
