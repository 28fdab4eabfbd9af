"""Changes inside a window that no program of tests/programs makes: found, not trained with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.support import mlp, pieces, samples, sgd, summed
from wholebatch.errors import WindowError

MICROS = pieces(samples(12), [5, 3, 4])


def _clear_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(model.parameters()).grad = None


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        (lambda m, o: o.zero_grad(set_to_none=False), "remove zero_grad"),
        (_clear_one, "gradient of 0.weight has changed"),
        (lambda m, o: m[2].bias.grad.zero_(), "gradient of 2.bias has changed"),
    ],
    ids=["zeroed", "cleared", "one zeroed"],
)
@pytest.mark.parametrize("at_flush", [False, True])
def test_a_line_of_the_old_loop_is_found(
    meddle: Callable[[nn.Module, torch.optim.Optimizer], None], message: str, at_flush: bool
) -> None:
    model = mlp()
    optimizer = sgd(model)
    acc = wb.Accumulator(model, optimizer, steps=3)
    acc.backward(summed(model, MICROS[0]), units=5)
    meddle(model, optimizer)
    with pytest.raises(WindowError, match=f"{message}.*discard.. drops what this window holds"):
        acc.flush() if at_flush else acc.backward(summed(model, MICROS[1]), units=3)
    acc.discard()
    assert all(parameter.grad is None for parameter in model.parameters())
