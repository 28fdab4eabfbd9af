"""Out of memory anywhere in a window ends in the numbers of the split that went through."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.memory.inject import LimitedMemory
from tests.memory.models import loss, mlp, vectors


def test_one_sample_that_does_not_fit_says_what_would_help() -> None:
    model = mlp()

    def fails(model: nn.Module, micro: Any) -> wb.Loss:
        raise torch.OutOfMemoryError("full at 3 bytes")

    options: Any = {"loss": fails, "micro_batch": 1, "audit": False}
    train = wb.WholeBatch(model, torch.optim.SGD(model.parameters()), **options)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"of one sample does not fit .*full at 3 bytes.*bf16"
    ):
        train.step(vectors(2))


def test_a_window_within_so_many_bytes_is_the_same_update() -> None:
    def updated(budget: int | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = mlp(64).double()
        train = wb.WholeBatch(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, micro_batch="auto"
        )
        batch = {k: v.double() if v.is_floating_point() else v for k, v in vectors(256).items()}
        with LimitedMemory(budget, model) if budget else nullcontext():
            step = train.step(batch)
        return list(model.parameters()), step.micro_batches

    whole, one = updated(None)
    parts, many = updated(300_000)
    assert (one, many > 1) == (1, True)
    for a, b in zip(whole, parts, strict=True):
        assert (a - b).norm() <= 1e-12 * a.norm()
