""" "auto" spends on a graph what the run has lasted already, and not more."""

from __future__ import annotations

import torch

from wholebatch.compile.execute_mode import ExecutePlan

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def aged(seconds: float) -> ExecutePlan:
    plan = ExecutePlan.of("auto", CUDA)
    plan.started -= seconds
    return plan


def test_a_young_run_stays_eager() -> None:
    assert not aged(0.0).prepares(0, 5, first=True)
    assert aged(5.0).prepares(0, 5, first=True)


def test_an_old_run_is_compiled_when_that_would_have_been_paid_for() -> None:
    assert aged(5.0).upgrades(2000, compiled=0, runs=1)  # a thread compiles the first at once
    assert not aged(30.0).upgrades(2000, compiled=1, runs=1)  # the second costs as much again
    assert aged(9999.0).upgrades(2000, compiled=7, runs=1)
    assert not aged(9999.0).upgrades(2000, compiled=8, runs=1)
    assert not aged(9999.0).compiles_at_once(0)


def test_a_rare_kind_waits_until_it_has_taken_as_long_itself() -> None:
    plan = aged(100.0)
    plan.micro_batches = 100
    assert plan.upgrades(2000, compiled=1, runs=60)
    assert not plan.upgrades(2000, compiled=1, runs=10)


def test_what_was_asked_for_is_done_at_once() -> None:
    graph = ExecutePlan.of("graph", CUDA)
    assert graph.prepares(0, 1, first=True)
    assert graph.compiles_at_once(0)
    assert graph.captures
    assert not graph.upgrades(2000, 3, 1)
    graph.started -= 200.0  # more kinds than are compiled at once, in a run that has lasted
    assert graph.upgrades(2000, 3, 1)
    compile_ = ExecutePlan.of("compile", CPU)
    assert compile_.compiles_at_once(2)
    assert not compile_.captures


def test_kinds_that_share_a_graph_use_it_at_once() -> None:
    graph, compile_ = ExecutePlan.of("graph", CUDA), ExecutePlan.of("compile", CPU)
    assert graph.prepares(1, 1, first=False, shared=0)
    assert graph.records(31, 4)
    assert not graph.records(32, 4)  # recordings hold memory
    assert not graph.records(1, 3)
    assert compile_.prepares(3, 1, first=False, shared=5)
    assert not compile_.prepares(1, 1, first=False, shared=31)  # it may never come again
    assert compile_.prepares(1, 2, first=False, shared=500)
    assert not aged(0.0).prepares(1, 1, first=False, shared=1)
    assert aged(5.0).prepares(1, 1, first=False, shared=1)


def test_auto_traces_another_kind_when_it_has_trained_for_as_long_as_it_has_prepared() -> None:
    plan = aged(100.0)
    plan.spent = 60.0
    assert not plan.prepares(1, 2, first=False)
    assert plan.prepares(1, 1, first=False, shared=1)  # which is there already
    plan.spent = 40.0
    assert plan.prepares(1, 2, first=False)
    graph = ExecutePlan.of("graph", CUDA)
    graph.spent = 1e9
    assert graph.prepares(1, 2, first=False)
