"""The decision for one micro-batch is a pure function of the situation and the plan."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from wholebatch.compile.decide import (
    Decision,
    Eager,
    Make,
    Ready,
    Run,
    Situation,
    decide,
    is_too_slow,
)
from wholebatch.compile.execute_mode import ExecutePlan

ASKED = ExecutePlan(eager=False, compiles=True, captures=True, auto=False)
DONE: Future[None] = Future()
DONE.set_result(None)
NEW = Situation(
    ready=None,
    is_open=True,
    first=True,
    times=1,
    is_another_slot=False,
    is_shared=False,
    shared_is_compiled=False,
    own=0,
    others=0,
    compiled=0,
    compiling=0,
)
TRACED = Ready(compiled=False, beside=None, operations=100, runs=1)


@pytest.mark.parametrize(
    ("now", "decision"),
    [
        (NEW, Make(compiled=True)),
        (replace(NEW, first=False), Eager()),
        (replace(NEW, own=1), Eager()),  # A size seen once may not come again.
        (replace(NEW, own=1, times=2), Make(compiled=True)),
        (replace(NEW, own=16, times=2), Eager(is_full=True)),
        (replace(NEW, own=3, times=2, compiled=3), Make(compiled=False)),
        (replace(NEW, own=3, compiled=3, is_shared=True, shared_is_compiled=True), Make(True)),
        (replace(NEW, ready=replace(TRACED, compiled=True)), Run()),
        (replace(NEW, ready=replace(TRACED, compiled=True), is_open=False), Eager()),
        (replace(NEW, ready=TRACED, is_shared=True, shared_is_compiled=True), Make(True)),
        (replace(NEW, ready=replace(TRACED, beside=Future())), Run()),
        (replace(NEW, ready=replace(TRACED, beside=DONE)), Make(compiled=True)),
        (replace(NEW, ready=replace(TRACED, beside=DONE), first=False), Run()),
        (replace(NEW, ready=TRACED, compiled=8), Run(compiles=False)),
    ],
)
def test_a_micro_batch_runs_its_graph_or_makes_one_or_is_eager(
    now: Situation, decision: Decision
) -> None:
    assert decide(now, ASKED) == decision


def test_a_graph_as_traced_that_is_slower_than_eager_code_is_not_kept() -> None:
    assert is_too_slow(4.67, 1.0)
    assert not is_too_slow(1.2, 1.0)
