"""The proof of every way to keep gradients; an approximation is never called the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import adamw, mlp, samples
from wholebatch.offload.parameter_buckets import BUCKET_BYTES


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def verified(gradients: str, model: nn.Module | None = None, **options: Any) -> Any:
    model = mlp() if model is None else model
    return wb.verify(
        model,
        loss,
        samples(12, dtype=next(model.parameters()).dtype),
        micro_batch=5,
        optimizer=adamw(model),
        gradients=gradients,
        units=lambda m: len(m["y"]),
        **options,
    )


@pytest.mark.parametrize("on", ["device", "host"])
def test_host_is_proven(on: str) -> None:
    verdict = verified("host", optimizer_on=on, clip_norm=0.1)
    assert verdict.same, str(verdict)
    assert verdict.gradient.distance < 1e-13


def test_swap_is_proven() -> None:
    verdict = verified("swap", clip_norm=0.1)
    assert verdict.same, str(verdict)
    assert verdict.gradient.distance < 1e-13


def test_release_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUCKET_BYTES, "release", 1100)
    verdict = verified("release", nonfinite="skip")
    assert verdict.same, str(verdict)


def test_host_finds_what_plain_finds() -> None:
    class Coupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x - x.mean(0))

    verdict = verified("host", Coupled())
    assert not verdict.same
    assert not verdict.approximate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_moments_are_approximate_with_the_distance_measured(dtype: torch.dtype) -> None:
    verdict = verified("moments", mlp(dtype=dtype))
    assert not verdict.same
    assert verdict.approximate
    assert verdict.exit_status == 1
    assert verdict.line.startswith("APPROXIMATE update: first moment")
    assert verdict.gradient.what == "first moment"
    assert verdict.gradient.same
    # Measured in an update that has old moments to round: the first of all would be exact.
    least, most = (1e-10, 1e-6) if dtype is torch.float64 else (1e-6, 5e-3)
    assert least < verdict.update.distance < most
    assert "the second moment is" in str(verdict)
    assert "the first moment is exact" in str(verdict)
    assert verdict.to_dict()["approximate"] is True
