"""On many small models: no false alarm, and an error of one in a thousand is never missed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import loss

Micro = dict[str, Tensor]


def slightly_wrong(model: nn.Module, micro: Micro) -> wb.Loss:
    """Counts a thousandth more in a smaller micro-batch."""
    right = loss(model, micro)
    return wb.Loss(right.total * (1 + 0.001 / len(micro["y"])), right.units)


def problem(seed: int) -> tuple[nn.Module, Micro, int, dict[str, Any]]:
    """Widths, activations, normalisations, scales, optimizers, clipping, all by the seed."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    width = choose.choice([4, 9, 16])
    activation = choose.choice([nn.ReLU, nn.Tanh, nn.GELU])
    norm = choose.choice([nn.Identity(), nn.LayerNorm(width), nn.BatchNorm1d(width)])
    model = nn.Sequential(
        nn.Linear(6, width),
        norm,
        activation(),
        nn.Linear(width, width),
        activation(),
        nn.Linear(width, 3),
    )
    samples = choose.randint(8, 40)
    batch = {
        "x": torch.randn(samples, 6) * choose.choice([0.1, 1.0, 10.0]),
        "y": torch.randint(0, 3, (samples,)),
    }
    micro_batch = choose.randint(2, samples // 2)
    if isinstance(norm, nn.BatchNorm1d) and samples % micro_batch == 1:
        micro_batch += 1
    optimizers: list[torch.optim.Optimizer | None] = [
        None,
        torch.optim.AdamW(model.parameters()),
        torch.optim.Adam(model.parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
    ]
    options = {
        "optimizer": choose.choice(optimizers),
        "precision": choose.choice(["full", "full", "bf16", "fp16"]),
        "clip_norm": choose.choice([None, 0.05]),
    }
    return model, batch, micro_batch, options


@pytest.mark.parametrize("first", [0, 10, 20, 30])
def test_no_false_alarm(first: int) -> None:
    for seed in range(first, first + 10):
        model, batch, micro_batch, options = problem(seed)
        verdict = wb.verify(model, loss, batch, micro_batch=micro_batch, **options)
        assert verdict.same, f"seed {seed}: {verdict}"


def test_no_error_is_missed() -> None:
    """Whatever hides it: bf16 has three digits, but float64 is run too.

    BatchNorms are frozen: with one that trains the batch is not divided, and there is no error.
    """
    for seed in range(20):
        model, batch, micro_batch, options = problem(seed)
        options.update(clip_norm=None, batchnorm="freeze")
        verdict = wb.verify(model, slightly_wrong, batch, micro_batch=micro_batch, **options)
        assert not verdict.same, f"seed {seed}: {verdict}"
