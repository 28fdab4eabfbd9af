"""The decision for one micro-batch: run a graph, make one, or run eager code."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from wholebatch.compile.execute_mode import ExecutePlan


@dataclass(frozen=True)
class Run:
    """Run the graph that is ready."""

    compiles: bool = False
    """True to begin compiling it, in a thread beside the run."""


@dataclass(frozen=True)
class Eager:
    """Run eager code."""

    reason: str | None = None
    """Why, if the user should know."""
    is_full: bool = False
    """True if further sizes get no graphs."""


@dataclass(frozen=True)
class Make:
    """Run eager code, make a graph of it, and compare the two."""

    compiled: bool


Decision: TypeAlias = Run | Eager | Make


@dataclass(frozen=True)
class Ready:
    """What the decision must know of a graph that is ready."""

    compiled: bool
    beside: Future[Any] | None
    """The same graph, as a thread compiles it."""
    operations: int
    """The number of operations that a compiler has to compile."""
    runs: int


@dataclass(frozen=True)
class Situation:
    """A micro-batch, the cache entry that serves it, and the graphs that there are."""

    ready: Ready | None
    is_open: bool
    """True if the window has begun, so that its seed is known."""
    first: bool
    """True if no gradient of the window was added yet."""
    times: int
    """How many micro-batches of this kind there were, this one included."""
    is_another_slot: bool
    """True if its kind has a graph for another value of what the code reads, or one to prove."""
    is_shared: bool
    """True if an entry of open sizes serves it."""
    shared_is_compiled: bool
    own: int
    """The number of other kinds with a graph of their own."""
    others: int
    """The number of other kinds that an entry of open sizes serves."""
    compiled: int
    compiling: int


def decide(now: Situation, plan: ExecutePlan) -> Decision:
    """Return how this micro-batch runs.

    Where compilation was asked for, the first kinds are compiled at once. Otherwise a thread
    compiles while the graph runs as traced, and the first micro-batch of a window switches.
    """
    if now.ready is None:
        first = now.first or (now.is_another_slot and now.times > 1)
        shared = now.others if now.is_shared else None
        if not plan.prepares(now.own, now.times, first=first, shared=shared):
            full = not now.is_shared and now.times > 1 and plan.is_full(now.own)
            return Eager(is_full=full)
        at_once = plan.compiles_at_once(now.compiled)
        return Make(at_once or (plan.compiles and now.shared_is_compiled))
    if not now.is_open:
        return Eager()  # The seed of the first window is that of its first loss, by eager code.
    if now.ready.compiled or not plan.compiles:
        return Run()
    if now.shared_is_compiled:
        return Make(compiled=True)  # It only needs a new capture.
    if now.ready.beside is not None:
        return Make(compiled=True) if now.first and now.ready.beside.done() else Run()
    in_all = now.compiled + now.compiling
    return Run(compiles=plan.upgrades(now.ready.operations, in_all, now.ready.runs))


def is_too_slow(as_traced: float, eager: float) -> bool:
    """True if a graph as traced, which stays, is slower than eager code by more than chance."""
    return as_traced > 1.5 * eager
