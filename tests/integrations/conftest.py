"""The comparison's own training runs, and graphs that are not compiled, for the trainers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # the Keras cases run beside this file, and test that nothing imports torch
    import torch


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trainings of one problem by Transformers: undivided, by itself, and with wholebatch."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import compare.transformers as module

    return module


@pytest.fixture
def problem(hosts: Any) -> Any:
    """The problem: its data, model and distance."""
    return sys.modules["compare.problem"]


class Traces:
    """How many graphs were traced."""

    made = 0


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    """Graphs run as traced: the compiler takes too long for most tests."""
    from wholebatch.compile import make_graph
    from wholebatch.compile.execute_mode import ExecutePlan

    count, plan, trace = Traces(), ExecutePlan.of, make_graph.trace

    def traced(execute: str, device: torch.device) -> ExecutePlan:
        made = plan(execute, device)
        made.compiles = False
        return made

    def counted(*given: Any) -> Any:
        count.made += 1
        return trace(*given)

    monkeypatch.setattr(ExecutePlan, "of", staticmethod(traced))
    monkeypatch.setattr(make_graph, "trace", counted)
    return count
