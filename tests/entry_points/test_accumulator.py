"""Accumulator against the undivided batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional

import wholebatch as wb
from tests import processes
from tests.support import (
    Seen,
    Whole,
    adamw,
    distance,
    mlp,
    pieces,
    samples,
    sgd,
    trained,
)

SPLITS = [
    [5, 1, 7, 11],
    [23, 1],
    [1] * 24,
]


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("clip", [None, 0.05, 100.0])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_same_update_as_the_undivided_batch(
    sizes: list[int], clip: float | None, make: Any
) -> None:
    model, batch = mlp(), samples(24)
    whole = Whole(model, make, clip_norm=clip)
    loss = whole.step(batch)
    optimizer = make(model)
    gradients = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=len(sizes), clip_norm=clip)
    [step] = trained(model, acc, pieces(batch, sizes))
    whole.assert_same(model, gradients)
    assert step.loss == pytest.approx(loss, rel=1e-14)
    assert (step.update, step.units, step.micro_batches) == (1, 24.0, len(sizes))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hand_written_loop_is_wrong_on_the_same_case() -> None:
    """So that the tests above can fail: the usual mean/K loop is far off on uneven sizes."""
    model, batch = mlp(), samples(24)
    whole = Whole(model)
    whole.step(batch)
    optimizer = sgd(model)
    for micro in pieces(batch, [20, 1, 1, 2]):
        (functional.cross_entropy(model(micro["x"]), micro["y"]) / 4).backward()
    optimizer.step()
    update = [a - b for a, b in zip(model.parameters(), whole.start.parameters(), strict=True)]
    assert distance(update, whole.updates()) > 0.1


def test_steps_change_by_update_by_epoch_and_by_a_function() -> None:
    for steps, expected in (
        ({0: 2, 2: 3}, [2, 2, 3, 2]),
        (lambda update: update + 2, [2, 3, 4]),
        (wb.by_epoch({0: 4, 1: 9}), [4, 4, 1]),
    ):
        model = mlp()
        acc = wb.Accumulator(model, sgd(model), steps=steps)
        reports = trained(model, acc, pieces(samples(9), [1] * 9))
        assert [step.micro_batches for step in reports] == expected
    assert [s.micro_batches for s in trained(model, acc, pieces(samples(9), [1] * 9))] == [9]


def test_a_function_of_the_update_must_return_a_number_of_micro_batches() -> None:
    model = mlp()
    with pytest.raises(wb.errors.OptionError, match=r"returns 0 for update 0: it must return a"):
        wb.Accumulator(model, sgd(model), steps=lambda update: update)


_ENDS_OPEN = """
import torch, wholebatch as wb
model = torch.nn.Linear(2, 1)
acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
acc.backward(model(torch.ones(4, 2)).square().sum(), units=4)
"""


@pytest.mark.slow
def test_a_script_that_ends_in_a_window_is_warned(tmp_path: Path) -> None:
    ended = processes.run_code(_ENDS_OPEN, folder=tmp_path)
    assert ended.returncode == 0
    assert "deleted with an open window (micro-batches in it: 1)" in ended.stderr
    assert "Traceback" not in ended.stderr
