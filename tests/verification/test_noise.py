"""`verify` on losses that draw random numbers: they are the cause, and the lines are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.support import mlp, samples

BATCH = samples(13, dtype=torch.float32)


def denoising(model: nn.Module, micro: Any) -> wb.Loss:
    """A diffusion loss: noise and a time for every sample, drawn in the loss."""
    x = micro["x"]
    noise, time = torch.randn_like(x), torch.rand(len(x), 1)
    off = F.mse_loss(model(x * (1 - time) + noise * time), noise, reduction="sum")
    return wb.Loss(off, len(x))


def denoising_mean(model: nn.Module, micro: Any) -> wb.Loss:
    x = micro["x"]
    noise = torch.randn_like(x)
    return wb.Loss(F.mse_loss(model(x + noise), noise), 1)


class Recomputed(nn.Module):
    """Noise inside a checkpointed block is drawn again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(
            lambda given: self.body(given + torch.randn_like(given)), x, use_reentrant=False
        )
        return out


def classified(model: nn.Module, micro: Any) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def network(outputs: int) -> nn.Module:
    return mlp(classes=outputs, dtype=torch.float32)


@pytest.mark.parametrize("drops", [False, True])
def test_noise_is_the_only_cause(drops: bool) -> None:
    model = nn.Sequential(network(5), nn.Dropout(0.2)) if drops else network(5)
    verdict = wb.verify(model, denoising, BATCH, micro_batch=4)
    assert not verdict.same
    assert [cause.name for cause in verdict.causes] == ["randomness"], verdict
    evidence = verdict.causes[0].variant
    assert "randn_like (test_noise.py:" in evidence
    assert "rand (test_noise.py:" in evidence
    assert not verdict.notes
    assert "pass them in it" in verdict.causes[0].instead


def test_noise_that_comes_with_the_batch_is_the_same_update() -> None:
    """The advice leads to an exact update."""

    def loss(model: nn.Module, micro: Any) -> wb.Loss:
        x, noise, time = micro["x"], micro["noise"], micro["time"]
        off = F.mse_loss(model(x * (1 - time) + noise * time), noise, reduction="sum")
        return wb.Loss(off, len(x))

    batch = {**BATCH, "noise": torch.randn_like(BATCH["x"]), "time": torch.rand(13, 1)}
    verdict = wb.verify(network(5), loss, batch, micro_batch=4)
    assert verdict.same
    assert not verdict.causes


@pytest.mark.parametrize(
    ("loss", "make"),
    [
        (denoising_mean, lambda: network(5)),
        (classified, Recomputed),
    ],
)
def test_noise_is_named_first(loss: Any, make: Any) -> None:
    """Another cause may be behind it, which a proof with the noise in the batch names."""
    verdict = wb.verify(make(), loss, BATCH, micro_batch=4)
    assert [cause.name for cause in verdict.causes] == ["randomness"], verdict
    assert "another cause may be hidden behind this one" in verdict.causes[0].instead


def test_numbers_drawn_in_the_order_of_the_batch_are_the_same() -> None:
    numpy = pytest.importorskip("numpy")

    def loss(model: nn.Module, micro: Any) -> wb.Loss:
        noise = torch.from_numpy(numpy.random.randn(*micro["x"].shape)).float()
        return wb.cross_entropy(model(micro["x"] + noise), micro["y"])

    verdict = wb.verify(network(3), loss, BATCH, micro_batch=4)
    assert verdict.same
    assert "draws random numbers: here those of the undivided batch" in verdict.notes[0]
