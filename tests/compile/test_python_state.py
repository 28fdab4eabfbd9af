"""Python state around a graph: what it reads is as it was, what it writes no graph would write."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import Micro, loss, mode_of, traced
from tests.support import mlp, samples, sgd
from wholebatch.compile import ExecuteWarning


class Net(nn.Module):
    """A perceptron whose hidden layer passes through `more`."""

    def __init__(self, more: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0
        self.table: Tensor | None = None
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.more(self, torch.tanh(self.first(x))))
        return out


def follows_its_mean(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean.mul_(0.9).add_(0.1 * x.mean(0))
    return x - net.mean


def looks_up(net: Net, x: Tensor) -> Tensor:
    if net.table is None:
        net.table = torch.linspace(0.5, 1.5, 8, dtype=x.dtype)
    return x * net.table


def counts(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return x * (1.0 + 0.1 * net.calls)


def draws(_: Net, x: Tensor) -> Tensor:
    return x * (1.0 + float(numpy.random.rand()))


def both_ways(make: Callable[[], nn.Module], loss_of: Callable[[], Any]) -> tuple[str, list[str]]:
    """Five windows as a graph (if it can be) beside eager code: mode, and what was said."""
    found = []
    said: list[str] = []
    mode = ""

    def noted(text: Any, kind: Any = None, *_: Any, **__: Any) -> None:
        if kind is ExecuteWarning:
            said.append(str(text))

    for execute in ("eager", "compile"):
        numpy.random.seed(0)
        model = make().double()
        train = traced(model, loss=loss_of(), execute=execute, audit=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", noted)
            losses = [train.step(samples(8 + seed)).loss for seed in range(5)]
        mode = mode_of(train)
        found.append((losses, [p.detach() for p in model.parameters()], list(model.buffers())))
    for ours, theirs in zip(found[1], found[0], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.as_tensor(a).allclose(torch.as_tensor(b), rtol=1e-12, atol=1e-14)
    return mode, said


@pytest.mark.parametrize("more", [follows_its_mean, looks_up])
def test_constants_and_moved_buffers_are_part_of_the_graph(more: Any) -> None:
    mode, said = both_ways(lambda: Net(more), lambda: loss)
    assert mode == "operations"
    assert not said


@pytest.mark.parametrize(
    ("more", "what"),
    [(counts, "model.calls"), (draws, "numpy.random.rand()")],
)
def test_a_forward_that_leaves_something_behind(more: Any, what: str) -> None:
    mode, said = both_ways(lambda: Net(more), lambda: loss)
    assert mode == "eager"
    assert len(said) == 1
    assert what in said[0]


def in_a_free_variable() -> Any:
    weight = 1.0

    def annealed(model: nn.Module, micro: Micro) -> wb.Loss:
        nonlocal weight
        weight *= 0.999
        plain = loss(model, micro)
        return wb.Loss(plain.total * weight, plain.units)

    return annealed


def in_a_tensor() -> Any:
    seen = torch.ones((), dtype=torch.float64)

    def followed(model: nn.Module, micro: Micro) -> wb.Loss:
        plain = loss(model, micro)
        seen.mul_(0.9).add_(0.1 * plain.total.detach())
        return wb.Loss(plain.total * (1.0 + 0.01 * seen), plain.units)

    return followed


@pytest.mark.parametrize(
    "make",
    [in_a_free_variable, in_a_tensor],
)
def test_a_loss_function_that_changes_its_own_state(make: Any) -> None:
    """Tracing calls it once more than eager code does, and must not be felt."""
    mode, said = both_ways(mlp, make)
    assert mode == "eager"
    assert len(said) == 1
    assert "which a graph would do only once" in said[0]


def test_state_that_is_changed_between_windows_makes_a_new_graph() -> None:
    """Wherever the loss function finds it; other things of the same objects may change."""
    options = {"power": [1.0]}
    trainer = SimpleNamespace(config=SimpleNamespace(weight=1.0), step=0)
    small = torch.ones((), dtype=torch.float64)

    def annealed(model: nn.Module, micro: Micro) -> wb.Loss:
        plain = loss(model, micro)
        weight = trainer.config.weight * options["power"][0] * small
        return wb.Loss(plain.total * weight, plain.units)

    model, reference = mlp(), mlp()
    train = traced(model, loss=annealed)
    eager = wb.WholeBatch(reference, sgd(reference), loss=annealed, micro_batch=4, execute="eager")
    for step in range(9):
        trainer.step += 1
        options["power"][0] = 1.0 if step < 3 else 0.6
        trainer.config.weight = 1.0 if step < 5 else 0.7
        if step == 7:
            small.mul_(2.0)
        found, wanted = train.step(samples(8)), eager.step(samples(8))
        assert found.loss == pytest.approx(wanted.loss, rel=1e-12)
    assert mode_of(train) == "operations"


def test_what_changes_at_every_window_is_for_eager_code() -> None:
    weight = 1.0

    def annealed(model: nn.Module, micro: Micro) -> wb.Loss:
        plain = loss(model, micro)
        return wb.Loss(plain.total * weight, plain.units)

    model = mlp()
    train = traced(model, loss=annealed)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(12):
            weight *= 0.99
            train.step(samples(8))
    [text] = [str(one.message) for one in said]
    assert re.search(r"weight \(.*test_python_state.py:\d+\) changes often", text)
    assert mode_of(train) == "eager"
