"""The mode in which micro-steps execute: the option, when to compile, and the messages.

The number of steps to come is not known. So "auto" spends as much time on preparation as the run
has already taken, and is never much slower than twice the best choice. It traces after a few
seconds, and replays the graph as traced while a thread compiles it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch
import torch.distributed as dist

from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.warn_user import warn_user

_LOG = logging.getLogger("wholebatch.compile")
_TRACE_AFTER = 3.0
"""Seconds of training before "auto" makes its first graph; tracing takes about as long."""
_SILENT = 1.0
"""Seconds after which the user is told what the run waits for."""
_COMPILE_PER_OPERATION = 0.012
"""Seconds that Inductor takes per operation (33 s for 2,700 of them beside an H200)."""
_KINDS = 16
"""The most kinds of micro-batches that get a graph of their own and are captured."""
_KINDS_IN_ALL = 32
"""The most kinds that are captured, shared graphs included; each holds memory for its inputs."""
_RECORDED_AFTER = 4
"""The number of micro-batches of a kind after which a shared graph is captured for it."""
_AT_ONCE = 3
"""The most graphs that are compiled at once when compilation was asked for."""
_COMPILED = 8
"""The most graphs that are compiled; the later ones only once the run is old enough."""


class ExecuteWarning(UserWarning):
    """The requested `execute` mode is not possible here; a slower one makes the same update."""


class CannotTrace(Exception):
    """A micro-step cannot be made into one graph. The message is the reason."""


class Notes:
    """Gives each message once: fallbacks from a requested mode as warnings, the rest in the log.

    Messages about speed are printed if the user has not set up logging.
    """

    def __init__(self, *, asked: bool) -> None:
        self._asked = asked
        self.history: list[str] = []
        self.reasons: list[str] = []
        """Why micro-steps run in a slower mode."""
        self._work: tuple[str, float] | None = None

    def fell_back(self, from_: str, to: str, reason: str) -> None:
        """Warn that the mode named by `execute=` is not possible; under "auto", only log it."""
        text = f"execute={from_!r} is not possible here: {reason}. Micro-steps run {to} instead"
        self.reasons.append(reason)
        if not self._asked:
            self.tell(f"micro-steps run {to}: {reason}", shows=True)
        elif text not in self.history:
            self.history.append(text)
            warn_user(text, ExecuteWarning)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Say what the run waits for, if that takes longer than a second, while it waits."""
        self._work = what, time.perf_counter()
        timer = threading.Timer(_SILENT, self._show, [f"{what}: the run waits for it"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._work = None

    @property
    def work(self) -> str | None:
        """What the run waits for now, and for how long: "tracing, 9 s". Other threads may ask."""
        work = self._work
        return None if work is None else f"{work[0]}, {time.perf_counter() - work[1]:.0f} s"

    def runs_in(self, mode: str) -> None:
        """Tell that micro-steps run in this kind of graph from now on."""
        self.tell(f"micro-steps are now {_MODES[mode]}", shows=True)

    def tell(self, text: str, *, shows: bool = False) -> None:
        """Log a message; with `shows`, print it where logs of this kind are not kept."""
        if text in self.history:
            return
        self.history.append(text)
        if shows:
            self._show(text)
        else:
            _LOG.info(text)

    def _show(self, text: str) -> None:
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info(text)
        elif not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            print(f"wholebatch: {text}", file=sys.stderr)


_MODES = {
    "operations": "one traced graph",
    "compile": "one compiled graph",
    "graph of operations": "one recorded graph, not compiled yet",
    "graph of compile": "one recorded graph",
}


def reason_of(problem: BaseException) -> str:
    """Return an exception as a reason to quote: a CannotTrace's message, else class and line."""
    if isinstance(problem, CannotTrace):
        return str(problem)
    return f"{type(problem).__name__}: {first_line(problem)}"


def first_line(problem: BaseException) -> str:
    """Return the first line of an exception's message, short enough to quote in another."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"


Execute: TypeAlias = Literal["auto", "eager", "compile", "graph"]


def check_execute(execute: object, device: torch.device) -> Execute:
    """Return how micro-steps run here; raise an error that says what is allowed.

    "auto" is eager code where torch is too old for graphs.
    """
    if execute not in get_args(Execute):
        allowed = ", ".join(repr(mode) for mode in get_args(Execute))
        raise OptionError(f"execute={execute!r}: must be one of {allowed}")
    if execute == "graph" and device.type != "cuda":
        raise OptionError(
            f"execute='graph' on device {device.type!r}: CUDA graphs need a CUDA device; use "
            "'compile', or leave it at 'auto'"
        )
    if execute == "eager" or hasattr(torch.nn.Parameter, "grad_dtype"):  # since torch 2.11
        return execute  # type: ignore[return-value]
    if execute == "auto":
        return "eager"
    raise UnsupportedError(
        f"execute={execute!r} with torch {torch.__version__}: compiled and recorded graphs need "
        'torch 2.11 or newer; use execute="eager", or "auto"'
    )


@dataclass
class ExecutePlan:
    """The modes that are possible, and the decision which of them pay."""

    eager: bool
    compiles: bool
    captures: bool
    auto: bool
    started: float = field(default_factory=time.perf_counter)
    spent: float = 0.0
    """Seconds spent on preparation so far."""
    micro_batches: int = 0
    """The number of micro-batches so far."""

    @staticmethod
    def of(execute: str, device: torch.device) -> ExecutePlan:
        """Return the plan for this option; on a CPU, compile only on request."""
        on_cuda = device.type == "cuda"
        if execute == "auto":
            return ExecutePlan(eager=not on_cuda, compiles=on_cuda, captures=on_cuda, auto=True)
        return ExecutePlan(
            eager=execute == "eager",
            compiles=execute in ("compile", "graph"),
            captures=execute == "graph",
            auto=False,
        )

    def prepares(self, graphs: int, times: int, *, first: bool, shared: int | None = None) -> bool:
        """True if a kind of micro-batch that came `times` times should get a graph now.

        `graphs` is the number of kinds that have graphs of their own. The first graph is made at
        the first micro-batch of a window: there the eager gradients are those of this micro-batch
        alone and can be compared.
        `shared` is the number of kinds served by shared graphs, if one of these serves this kind;
        it then only has to be checked against eager code.
        """
        age = time.perf_counter() - self.started
        if self.auto and (
            age < _TRACE_AFTER or (shared is None and graphs and age < 2 * self.spent)
        ):
            return False
        if shared is not None:
            # Sizes that never come again would each be computed twice for nothing.
            return graphs + shared < _KINDS_IN_ALL or times > 1
        # A short last micro-batch comes again in every window; a size seen once may not.
        return first if graphs == 0 else times > 1 and not self.is_full(graphs)

    def is_full(self, graphs: int) -> bool:
        """True if no further kind gets a graph of its own."""
        return graphs >= (_KINDS if self.captures else _AT_ONCE)

    def records(self, recorded: int, times: int) -> bool:
        """True if a kind that came `times` times in a shared graph should be captured now."""
        return self.captures and times >= _RECORDED_AFTER and recorded < _KINDS_IN_ALL

    def compiles_at_once(self, compiled: int) -> bool:
        """True if a new graph is compiled immediately; `compiled` graphs are compiled already."""
        return self.compiles and not self.auto and compiled < _AT_ONCE

    def upgrades(self, operations: int, compiled: int, runs: int) -> bool:
        """True if a traced graph that has run `runs` times should be compiled now, in a thread.

        `operations` are those to compile; layers that are alike count once. The first graph is
        compiled at once. Others are compiled once the run has spent on their kind of micro-batch as
        long as compilation takes.
        """
        if not self.compiles or compiled >= _COMPILED:
            return False
        if self.auto and not compiled:
            return True
        age = time.perf_counter() - self.started
        share = min(1.0, runs / max(1, self.micro_batches))
        return age * share > (compiled + 1) * operations * _COMPILE_PER_OPERATION
