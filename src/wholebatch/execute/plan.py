"""When to trace, compile and record: what was asked for, or what has paid for itself by now.

Nobody knows how many steps are to come. So "auto" spends on preparation what the run has already
lasted: it traces and records after a few seconds (which makes launches free), traces further kinds
when as much of the run was training as was preparation, and compiles once the run is as old as the
compilation would take. It is then never much slower than twice the best choice, however short or
long the run turns out to be. A kind that has a graph already, because one serves many sizes, needs
little more than one micro-batch's time, and is not made to wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch

from wholebatch.errors import OptionError
from wholebatch.execute.notes import CannotTrace

__all__ = ["Execute", "Plan", "check_execute"]

Execute: TypeAlias = Literal["auto", "eager", "compile", "graph"]

_TRACE_AFTER = 3.0
"""Seconds of training before "auto" makes its first graph; tracing takes about as long."""
_COMPILE_PER_OPERATION = 0.012
"""Seconds that Inductor takes for each operation (33 s for 2,700 of them beside an H200)."""
_KINDS = 16
"""Kinds of micro-batches that have a graph of their own and are recorded."""
_KINDS_IN_ALL = 32
"""Kinds that are recorded, those that share a graph included; each holds memory for its inputs."""
_AT_ONCE = 3
"""Graphs that are compiled as soon as they come up, where compiling was asked for."""
_COMPILED = 8
"""Graphs that are compiled at all: the later ones as the run has lasted long enough."""
_CHANGES = 3.0
_FORGETS = 0.05
"""A change in more than one of 20 windows is too many for a graph to be made anew each time."""


def check_execute(execute: object, device: torch.device) -> Execute:
    """The option itself, or an OptionError that says what is allowed."""
    if execute not in get_args(Execute):
        allowed = ", ".join(repr(mode) for mode in get_args(Execute))
        raise OptionError(f"execute={execute!r}: must be one of {allowed}")
    if execute == "graph" and device.type != "cuda":
        raise OptionError(
            f"execute='graph' on device {device.type!r}: CUDA graphs need a CUDA device; use "
            "'compile', or leave it at 'auto'"
        )
    return execute  # type: ignore[return-value]


@dataclass
class Plan:
    """What is possible, and what is worth its time by now."""

    eager: bool
    compiles: bool
    captures: bool
    auto: bool
    started: float = field(default_factory=time.perf_counter)
    spent: float = 0.0
    """Seconds of preparation so far."""
    micro_batches: int = 0
    """How many there have been."""
    changes: float = 0.0
    """How often something that a graph was made for has changed of late."""

    @staticmethod
    def of(execute: str, device: torch.device) -> Plan:
        """The plan for this option; on a CPU, compiling pays only where it is asked for."""
        on_cuda = device.type == "cuda"
        if execute == "auto":
            return Plan(eager=not on_cuda, compiles=on_cuda, captures=on_cuda, auto=True)
        return Plan(
            eager=execute == "eager",
            compiles=execute in ("compile", "graph"),
            captures=execute == "graph",
            auto=False,
        )

    def look_at(self, changed: str | None, *, made: int) -> None:
        """A window begins; `changed` is what is no longer as it was when graphs were `made`.

        What changes once in a while is worth a new graph; what changes all the time is not.
        """
        self.changes = max(0.0, self.changes - _FORGETS)
        if changed is not None and made:
            self.changes += 1.0
            if self.changes > _CHANGES:
                raise CannotTrace(
                    f"{changed} changes again and again, and a graph holds for one value"
                )

    def prepares(self, made: int, seen: int, *, first: bool, shared: int | None = None) -> bool:
        """Whether to make a graph for a kind of micro-batch that was seen `seen` times.

        `made` kinds have graphs of their own by now. The first graph is made at the first
        micro-batch of a window, where eager code's gradients are those of this micro-batch alone
        and can be compared.
        `shared`: there is a graph that serves this kind, and so many others by now. Then it has
        only to be held against eager code, and recorded.
        """
        age = time.perf_counter() - self.started
        if self.auto and (age < _TRACE_AFTER or (shared is None and made and age < 2 * self.spent)):
            return False
        if shared is not None:
            if self.captures:
                return made + shared < _KINDS_IN_ALL
            # Sizes that never come again would each be computed twice, for nothing.
            return made + shared < _KINDS_IN_ALL or seen > 1
        # A short last micro-batch comes again with every window; a size that was seen once may not.
        limit = _KINDS if self.captures else _AT_ONCE
        return first if made == 0 else seen > 1 and made < limit

    def compiles_at_once(self, compiled: int, *, shared: bool = False) -> bool:
        """Whether a new graph is compiled from the start; `compiled` have been so far.

        `shared`: one of them serves many sizes. What is left is rare, and waits for its time.
        """
        limit = _AT_ONCE - 1 if shared else _AT_ONCE
        return self.compiles and not self.auto and compiled < limit

    def upgrades(self, operations: int, compiled: int, runs: int) -> bool:
        """Whether a graph that runs as traced, and has run so often, is worth compiling now.

        It is, when the run has spent on its kinds of micro-batches what compiling takes.
        """
        if not self.compiles or compiled >= _COMPILED:
            return False
        age = time.perf_counter() - self.started
        share = min(1.0, runs / max(1, self.micro_batches))
        return age * share > (compiled + 1) * operations * _COMPILE_PER_OPERATION
