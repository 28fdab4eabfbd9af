"""Several backwards of one micro-batch: the same units with each, counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wholebatch as wb
from tests.support import EXACT, distance, mlp, pieces, samples, sgd, summed
from wholebatch.errors import LossError

SPLITS = [(5, 1, 3), (1, 8), (3, 3, 3)]


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("again", [0, 3])
def test_other_units_are_refused(again: int, on_device: bool) -> None:
    model, batch = mlp(), samples(4)
    before = [p.detach().clone() for p in model.parameters()]
    acc = wb.Accumulator(model, sgd(model), steps=1)
    units: Any = (torch.tensor(4), torch.tensor(again)) if on_device else (4, again)
    acc.backward(summed(model, batch), units=units[0], more=True)
    with pytest.raises(LossError, match="two backwards of one micro-batch with different units"):
        acc.backward(model(batch["x"]).square().sum(), units=units[1])
    assert distance(model.parameters(), before) == 0.0


def test_terms_count_their_units_once() -> None:
    model, batch, sizes = mlp(), samples(9), (5, 1, 3)
    whole = mlp()
    optimizer = sgd(whole)
    out = whole(batch["x"])
    (out.square().mean(1).mean() + 0.5 * 3 * out.abs().mean(1).mean()).backward()
    optimizer.step()

    acc = wb.Accumulator(model, sgd(model), steps=3)
    acc.announce({"square": 9, "size": 9})
    for micro in pieces(batch, sizes):
        n = len(micro["y"])
        for weight, more in ((1.0, True), (2.0, False)):
            out = model(micro["x"])
            squares = out.square().mean(1).sum() if weight == 1.0 else out.sum() * 0
            terms: dict[str, Any] = {
                "square": wb.Loss(squares, n),
                "size": (wb.Loss(weight * out.abs().mean(1).sum(), n), 0.5),
            }
            acc.backward(wb.Loss.terms(terms), more=more)
    assert acc.updates == 1
    assert distance(model.parameters(), whole.parameters()) < EXACT


def test_last_false_makes_a_window_longer_than_steps() -> None:
    model, batch = mlp(), samples(9)
    acc = wb.Accumulator(model, sgd(model), steps=2)
    first, second, *others = pieces(batch, (1, 2, 3, 1, 2))
    assert acc.backward(summed(model, first), units=1, last=False) is None
    assert acc.backward(summed(model, second), units=2, last=False) is None
    for micro in others:
        assert acc.backward(summed(model, micro), units=len(micro["y"]), last=False) is None
    step = acc.flush()
    assert step is not None
    assert step.units == 9
