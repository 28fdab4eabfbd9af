"""How many updates an epoch has."""

from __future__ import annotations

import pytest
import torch

import wholebatch as wb
from tests.support import mlp, sgd


@pytest.mark.parametrize("micro_batches", [0, 1, 3, 4, 5, 10])
@pytest.mark.parametrize("steps", [1, 4, {0: 4, 1: 2, 2: 3}, lambda update: 1 + update])
def test_updates_per_epoch_are_those_of_the_loop(micro_batches: int, steps: object) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=steps)  # type: ignore[arg-type]
    loader = [torch.randn(2, 5, dtype=torch.float64) for _ in range(micro_batches)]
    for _ in range(2):  # the second epoch's windows follow the schedule from where it is
        before, wanted = acc.updates, acc.updates_per_epoch(loader)
        for micro in acc.over(loader):
            acc.backward(model(micro).square().sum(), units=len(micro))
        assert acc.updates - before == wanted


def test_a_loader_without_a_length_has_no_updates_per_epoch() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=4)
    with pytest.raises(wb.errors.OptionError, match=r"has no len.*step\.update"):
        acc.updates_per_epoch(iter(range(3)))  # type: ignore[arg-type]
