"""A thread compiles while the graph runs as traced; the next window switches."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import wholebatch as wb
from tests.compile.nets import mode_of, steps_of, traced
from tests.support import Whole, mlp, samples
from wholebatch.compile import ExecuteWarning, joint_graph
from wholebatch.compile.execute_mode import ExecutePlan


def auto(model: Any) -> wb.WholeBatch:
    """A run on a CPU that decides as "auto" does on a CUDA device, but captures nothing."""
    train = traced(model)
    executor = train._runner.executor
    plan = ExecutePlan(eager=False, compiles=True, captures=False, auto=True)
    plan.started -= 10.0
    executor._plan = executor._maker._plan = plan
    return train


def test_windows_go_on_while_the_compiler_works(monkeypatch: pytest.MonkeyPatch) -> None:
    release, threads = threading.Event(), []

    def slow(graph: Any, arguments: Any) -> Any:
        threads.append(threading.current_thread())
        assert release.wait(60)
        return graph

    monkeypatch.setattr(joint_graph, "compiled_by_inductor", slow)
    model = mlp()
    whole, train = Whole(model), auto(model)
    for _ in range(4):
        whole.step(samples(8))
        train.step(samples(8))
    assert mode_of(train) == "operations"
    assert train.compiling == "compiling beside the run"
    release.set()
    [slot] = train._runner.executor.kinds.slots()
    assert slot.ready is not None
    assert slot.ready.joint.beside is not None
    slot.ready.joint.beside.result()
    assert train.compiling is None
    for _ in range(2):
        whole.step(samples(8))
        train.step(samples(8))
    assert mode_of(train) == "compile"
    assert threading.main_thread() not in threads
    whole.assert_same(model)


def test_a_compiler_that_fails_leaves_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(joint_graph, "compiled_by_inductor", broken)
    model = mlp()
    whole, train = Whole(model), auto(model)

    def windows() -> None:
        for _ in range(5):
            whole.step(samples(8))
            train.step(samples(8))
            for step in steps_of(train).values():
                if step.joint.beside is not None:
                    step.joint.beside.exception()

    with pytest.warns(ExecuteWarning, match=r"cannot be compiled \(RuntimeError: no compiler here"):
        windows()
    assert mode_of(train) == "eager"
    whole.assert_same(model)
