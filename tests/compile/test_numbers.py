"""Whole numbers in a batch: symbols of one graph, or constants that are guarded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.compile.nets import mode_of, steps_of, traced
from tests.support import mlp, samples, sgd

RATES = torch.linspace(1.0, 0.1, 20).tolist()


def weighted(weight: Callable[[Any], Any]) -> Callable[[nn.Module, Any], Tensor]:
    """A loss whose weight depends on the number of the step."""

    def loss(model: nn.Module, micro: Any) -> Tensor:
        losses = functional.cross_entropy(model(micro["x"]), micro["y"], reduction="none")
        return losses * weight(micro["step"])

    return loss


def by_units(model: nn.Module, micro: Any) -> wb.Loss:
    losses = functional.cross_entropy(model(micro["x"]), micro["y"], reduction="none")
    return wb.Loss(losses.sum() * micro["step"], len(micro["y"]) * micro["step"])


def run(loss: Any, train: wb.WholeBatch, eager: wb.WholeBatch, windows: int = 10) -> list[str]:
    """Make the same windows by graphs and by eager code; return the mode of each."""
    modes = []
    for step in range(1, windows + 1):
        batch = {**samples(8 if step % 4 else 6), "step": step}
        assert train.step(batch).loss == pytest.approx(eager.step(batch).loss, rel=1e-12)
        modes.append(mode_of(train))
    return modes


def pair(loss: Any) -> tuple[wb.WholeBatch, wb.WholeBatch]:
    model, other = mlp(), mlp()
    eager = wb.WholeBatch(other, sgd(other), loss=loss, micro_batch=4, execute="eager")
    return traced(model, loss=loss), eager


def same(train: wb.WholeBatch, eager: wb.WholeBatch) -> bool:
    pairs = zip(train._root.parameters(), eager._root.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in pairs)


@pytest.mark.parametrize(
    "loss",
    [
        weighted(lambda step: min(1.0, step / 7)),
        weighted(float),
        weighted(lambda step: 1 / (1 + (step - 5) ** 2)),
        by_units,
    ],
    ids=["ramp", "float", "below zero", "units"],
)
def test_a_number_that_changes_is_a_symbol(loss: Any) -> None:
    train, eager = pair(loss)
    modes = run(loss, train, eager, windows=16)
    assert same(train, eager)
    assert modes.count("operations") >= 9, modes
    assert modes[-1] == "operations", modes
    assert any(one.joint.sizes is not None for one in steps_of(train).values())
    assert len({id(one.joint) for one in steps_of(train).values()}) <= 6
    assert not train._runner.executor.notes.reasons


@pytest.mark.parametrize(
    "loss",
    [
        weighted(lambda step: RATES[step]),
        weighted(lambda step: 0.5 if step > 6 else 2.0 + step),
        weighted(lambda step: step**0.5),
        weighted(lambda step: sum(0.1 for _ in range(step))),
    ],
    ids=["index", "branch", "root", "loop"],
)
def test_a_number_that_python_needs_is_a_constant(loss: Any) -> None:
    train, eager = pair(loss)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        modes = run(loss, train, eager, windows=12)
    assert same(train, eager)
    assert modes[-1] == "eager"
    assert any("the micro-batch['step']" in str(one.message) for one in told)
    assert len(train._runner.executor.kinds.by_key) < 8, "one for each number"


def test_numbers_that_nobody_reads_leave_one_graph() -> None:
    model = mlp()
    train = traced(model, loss=weighted(lambda step: 1.0))
    for step in range(1, 7):
        places = [10 * step + row for row in range(8)]
        train.step({**samples(8), "step": step, "places": places})
    [graph] = steps_of(train).values()
    assert graph.joint.sizes is None
    assert mode_of(train) == "operations"
