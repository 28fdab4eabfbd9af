"""One graph serves micro-batches of many sizes: the update is that of the undivided batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.compile.nets import (
    Micro,
    Tagger,
    dropping,
    loss,
    mean_of_tokens,
    mode_of,
    steps_of,
    tagged,
    traced,
)
from tests.support import Seen, Whole, distance, mlp, samples, sgd
from wholebatch.compile import graph_check, make_graph
from wholebatch.compile import joint_graph as joint_module
from wholebatch.compile.execute_mode import ExecutePlan


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for every graph that is traced: whether its sizes are open."""
    made: list[bool] = []
    plain = make_graph.trace

    def counted(program: Any, *rest: Any) -> Any:
        made.append(bool(program.sizes))
        return plain(program, *rest)

    monkeypatch.setattr(make_graph, "trace", counted)
    return made


def shared_by(train: wb.WholeBatch) -> int:
    """How many kinds run in a graph of open sizes."""
    steps = steps_of(train).values()
    return sum(step.joint.sizes is not None for step in steps)


def test_lengths_and_a_short_last_micro_batch(traces: list[bool]) -> None:
    model = Tagger().double()
    whole = Whole(model, loss=mean_of_tokens)
    train = traced(model)
    for length in (6, 6, 7, 7, 9, 5, 8, 6):
        whole.step(tagged(10, length))
        train.step(tagged(10, length))
    # The first that differs has fewer rows; then there are other lengths.
    assert traces == [False, True, True]
    assert shared_by(train) == len(steps_of(train)) - 1 == 9
    whole.assert_same(model)


def total_of_rows(model: nn.Module, micro: Tensor) -> wb.Loss:
    return wb.Loss(model(micro).sum(), micro.shape[0])


def test_dropout_in_a_graph_of_open_sizes(traces: list[bool]) -> None:
    model = dropping()
    optimizer = sgd(model)
    train = traced(model, optimizer, loss=total_of_rows, micro_batch=8)
    seen = Seen(model, optimizer)
    for number in (2, 2, 3, 3, 5, 5, 5):
        train.step(torch.ones(number, 64))
    assert traces == [False, True]
    assert shared_by(train) == 2
    shares = [{round(float(v) * 2.5) for v in g[0].flatten()} for g in seen.gradients[-2:]]
    assert shares[0] <= set(range(6))  # of 5 samples, each kept (twice as large) or dropped
    assert len(shares[0]) > 2
    assert not torch.equal(seen.gradients[-1][0], seen.gradients[-2][0])  # drawn anew


def by_shape(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.mean_loss(functional.cross_entropy(model(micro["x"]), micro["y"]), micro["y"].numel())


def test_units_that_are_a_size(traces: list[bool]) -> None:
    model = mlp()
    whole = Whole(model)
    train = traced(model, loss=by_shape)
    for number in (8, 8, 7, 7, 10, 6):
        loss_of_whole = whole.step(samples(number))
        assert train.step(samples(number)).loss == pytest.approx(loss_of_whole, rel=1e-12)
    assert traces == [False, True]
    assert shared_by(train) == 2  # of 3 and of 2 rows
    whole.assert_same(model)


class Pooled(nn.Module):
    """Does something else with long texts, and something of its own for each number of rows."""

    def __init__(self, more: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = mlp()
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.more(x))
        return out


def long_ones_differ(x: Tensor) -> Tensor:
    return x * 2.0 if x.shape[0] > 5 else x


def each_differs(x: Tensor) -> Tensor:
    return x * float(len(range(x.shape[0])))


def beside_eager(more: Callable[[Tensor], Tensor], numbers: tuple[int, ...]) -> wb.WholeBatch:
    """Has run batches of so many samples as eager code does."""
    model, eager = Pooled(more), Pooled(more)
    reference = wb.WholeBatch(eager, sgd(eager), loss=loss, micro_batch=8, execute="eager")
    train = traced(model, micro_batch=8)
    for number in numbers:
        train.step(samples(number))
        reference.step(samples(number))
    assert distance(model.parameters(), eager.parameters()) <= 1e-12
    return train


def test_sizes_for_which_the_code_does_something_else_are_not_admitted(traces: list[bool]) -> None:
    train = beside_eager(long_ones_differ, (8, 8, 3, 3, 4, 5, 2, 6, 6, 7, 7))
    assert traces == [False, True, True]  # for 2 to 5, and for what is more
    assert shared_by(train) == 6


def test_sizes_that_are_asked_for_have_graphs_of_their_own(
    traces: list[bool],
) -> None:
    train = beside_eager(each_differs, (8, 8, 3, 3, 4, 4, 5, 5))
    assert traces == [False, True, False, False]
    assert shared_by(train) == 0
    history = train._runner.executor.notes.history
    assert any("its code reads the sizes as numbers" in text for text in history)
    assert any("3 sizes of micro-batches have graphs" in text for text in history)


def test_a_graph_that_gives_something_else_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, traces: list[bool]
) -> None:
    """The first use is in the middle of a window: its gradients are compared all the same."""
    right = joint_module.JointStep.__call__

    def wrong(self: Any, tensors: Any, seeds: Any) -> Any:
        return right(self, tensors, [seed * 1.5 for seed in seeds] if self.sizes else seeds)

    monkeypatch.setattr(joint_module.JointStep, "__call__", wrong)
    model = mlp()
    whole = Whole(model)
    train = traced(model)
    for number in (8, 8, 11, 11, 10, 10):
        whole.step(samples(number))
        train.step(samples(number))
    assert traces == [False, True, False, False]
    assert shared_by(train) == 0
    assert "its gradient differs from that of eager code" in " ".join(
        train._runner.executor.notes.history
    )
    whole.assert_same(model)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A compiler that changes nothing; one entry for each graph: whether its sizes are open."""
    made: list[bool] = []

    def compiled(graph: Any, arguments: list[Any], *_: Any, **__: Any) -> Any:
        made.append(isinstance(arguments[0], torch.SymInt))
        return graph

    monkeypatch.setattr(joint_module, "compiled_by_inductor", compiled)
    return made


def test_auto_compiles_a_graph_once_for_all_that_share_it(compilations: list[bool]) -> None:
    model = mlp()
    whole = Whole(model)
    train = traced(model, micro_batch=16)
    executor = train._runner.executor
    executor._plan = executor._maker._plan = ExecutePlan(
        eager=False, compiles=False, captures=False, auto=True
    )
    executor._plan.started -= 1e9
    for step, number in enumerate((8, 8, 3, 3, 4, 8, 8, 3, 3, 4, 5)):
        executor._plan.compiles = step > 4  # by now the run has lasted long enough
        whole.step(samples(number))
        for one in steps_of(train).values():
            if one.joint.beside is not None:
                one.joint.beside.result()  # the next window finds it compiled
        train.step(samples(number))
        if step == 4:
            assert [one.mode for one in steps_of(train).values()] == ["operations"] * 3
    assert [one.mode for one in steps_of(train).values()] == ["compile"] * 4
    assert compilations == [False, True]
    whole.assert_same(model)


def test_a_kind_is_recorded_once_it_has_come_often(
    monkeypatch: pytest.MonkeyPatch, compilations: list[bool]
) -> None:
    """Until then the shared graph runs as it is: sizes that come once cost no recording."""
    recorded: list[int] = []

    def capture(run: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        rows = len(inputs.tensors[0])
        if rows == 6:
            raise RuntimeError("operation not permitted when stream is capturing")
        recorded.append(rows)
        return lambda *arguments: run(*arguments)

    monkeypatch.setattr(make_graph, "CapturedGraph", capture)
    for module in (make_graph, graph_check):
        monkeypatch.setattr(module, "rehearse", lambda run, *_, **__: [run() for _ in "12"][1])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", int)
    model = mlp()
    whole = Whole(model)
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=8, execute="compile")
    executor = train._runner.executor
    executor._plan.captures = True
    for rows in (8, 8, 11, 11, *range(12, 15), 13, 13, 13, 13, 14, 14, 14, 14, 15):
        whole.step(samples(rows))
        train.step(samples(rows))
    # The whole micro-batches of 8, the first kind of the shared graph, and one that came 4 times.
    assert recorded == [8, 3, 5]
    assert compilations == [False, True]
    assert not executor._plan.captures
    assert any("CUDA cannot record it" in line for line in executor.notes.history)
    modes = {key: step.mode for key, step in zip("83456", steps_of(train).values(), strict=False)}
    assert list(modes.values()) == ["graph of compile"] * 2 + [
        "compile",
        "graph of compile",
        "compile",
    ]
    whole.assert_same(model)


def test_a_compiler_that_cannot_leave_sizes_open(
    monkeypatch: pytest.MonkeyPatch, compilations: list[bool]
) -> None:
    """Each kind is compiled by itself then, as if nothing else had been tried; nobody is warned."""
    plain = joint_module.compiled_by_inductor

    def broken(graph: Any, arguments: list[Any], *more: Any, **options: Any) -> Any:
        compiled = plain(graph, arguments, *more, **options)
        if isinstance(arguments[0], torch.SymInt):
            raise RuntimeError("sizes must be numbers\nand a long story")
        return compiled

    monkeypatch.setattr(joint_module, "compiled_by_inductor", broken)
    model = mlp()
    whole = Whole(model)
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=16, execute="compile")
    for number in (8, 8, 3, 3, 4, 4, 8, 3, 4):
        whole.step(samples(number))
        train.step(samples(number))
    assert compilations == [False, True, False, False]
    assert mode_of(train) == "compile"
    assert shared_by(train) == 0
    history = train._runner.executor.notes.history
    assert any("RuntimeError: sizes must be numbers" in line for line in history)
    whole.assert_same(model)
