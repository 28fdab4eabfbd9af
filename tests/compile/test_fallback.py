"""What cannot be one graph runs another way, with the same update, and says so once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import Micro, loss, mode_of, steps_of, traced
from tests.support import Whole, mlp, samples, sgd
from wholebatch.compile import ExecuteWarning, kinds
from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.graph_check import _hold_against
from wholebatch.errors import OptionError


def test_a_model_that_is_compiled_already_stays_as_it_is() -> None:
    made = mlp()
    compiled: Any = torch.compile(made, backend="eager")
    train = traced(compiled, sgd(made))
    with pytest.warns(ExecuteWarning, match="the model is an OptimizedModule"):
        train.step(samples(8))
    train.step(samples(8))
    assert train.updates == 2


def test_a_parameter_of_the_loss_is_refused() -> None:
    model, temperature = mlp(), nn.Parameter(torch.ones((), dtype=torch.float64))

    def scaled(model: nn.Module, micro: Micro) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]) * temperature, micro["y"])

    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    train = traced(model, optimizer, loss=scaled)
    with pytest.warns(ExecuteWarning, match="parameters that are not in the model"):
        train.step(samples(8))
    train.step(samples(8))
    assert train.updates == 2


def test_what_the_loss_does_not_read_of_a_batch_may_be_anything() -> None:
    class Opaque:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    def on_pair(model: nn.Module, micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    model = mlp()
    whole, train = Whole(model), traced(model, loss=on_pair, static=["note", "path"])
    for number in range(4):
        note = {"note": Opaque(torch.ones(1)), "path": f"image {number}"}
        train.step({**samples(8), **note})
        whole.step(samples(8))
    assert mode_of(train) == "operations"
    assert len(steps_of(train)) == 1
    whole.assert_same(model)


def test_a_graph_that_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholebatch.compile import joint_graph as joint

    right = joint.JointStep.__call__

    def wrong(self: Any, tensors: Any, seeds: Any) -> Any:
        return right(self, tensors, [seed * 1.5 for seed in seeds])

    monkeypatch.setattr(joint.JointStep, "__call__", wrong)
    model = mlp()
    whole = Whole(model)
    train = traced(model)
    with pytest.warns(ExecuteWarning, match="its gradient differs from that of eager code by 5"):
        train.step(samples(10))
    train.step(samples(10))
    whole.step(samples(10))
    whole.step(samples(10))
    assert mode_of(train) == "eager"
    whole.assert_same(model)


def test_sizes_that_keep_changing_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_KEPT", 4)
    model = mlp()
    whole = Whole(model)
    train = traced(model, micro_batch=64)
    for number in range(3, 12):
        whole.step(samples(number))
        train.step(samples(number))
    assert len(steps_of(train)) == 1
    assert len(train._runner.executor.kinds.by_key) == 4
    assert mode_of(train) == "eager"
    whole.assert_same(model)


def test_auto_on_the_cpu_is_eager_and_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mlp()
        train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4)
        train.step(samples(8))
        train.step(samples(8))
    assert mode_of(train) == "eager"


@pytest.mark.parametrize(
    ("execute", "message"),
    [
        ("fast", "execute='fast': must be one of 'auto', 'eager', 'compile', 'graph'"),
        ("graph", "CUDA graphs need a CUDA device"),
    ],
)
def test_options_are_refused_at_construction(execute: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(OptionError, match=message):
        wb.WholeBatch(model, sgd(model), loss=loss, execute=execute)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_graph_that_is_not_finite_where_eager_code_is_differs(value: float) -> None:
    finite, broken = [torch.ones(3)], [torch.tensor([1.0, value, 1.0])]
    with pytest.raises(CannotTrace, match="its loss differs"):
        _hold_against(broken, finite, "loss", 0.1)
