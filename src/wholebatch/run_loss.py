"""Run the loss function of your own loop as one graph: forward, backward and addition.

`Accumulator.run` is given the function instead of its result, so it can do what `WholeBatch` does:
test that the loss adds up, and run forward, backward and addition as one recorded graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any
from weakref import proxy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.audit.loss_test import LossTest
from wholebatch.audit.model_calls import unwatched
from wholebatch.compile import Execute
from wholebatch.distributed.process_group import Group
from wholebatch.errors import WindowError
from wholebatch.loss_functions import check_run_function
from wholebatch.losses.loss import SINGLE, Loss, Terms
from wholebatch.runner import MicroStep, Place
from wholebatch.window.autocast import Full
from wholebatch.window.ledger import HALF_DONE, Ledger
from wholebatch.window.reachable_objects import content_of, inside
from wholebatch.window.replaced_attributes import replaced_attributes

_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_LEVELS = 3  # of functions inside functions in which modules are looked for
_MOST_FUNCTIONS = 8
"""The most loss functions that one accumulator runs."""


class RunFunctions:
    """The loss functions that `acc.run` was called with, each with its own test and graph."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        execute: Execute,
        audit: bool,
    ) -> None:
        self._ledger = ledger
        self._options: dict[str, Any] = {
            "execute": execute,
            "audit": audit,
        }
        self._functions: list[RunLoss] = []

    def __getitem__(self, loss: Callable[[Any], Any]) -> RunLoss:
        for function in self._functions:
            # A lambda that is made in the loop is another object each time, and the same function.
            if function.loss is loss or _identity(function.loss) == _identity(loss):
                return function
        return self.prepare(loss)

    def prepare(
        self, loss: Callable[[Any], Any], reads: Callable[..., Any] | None = None
    ) -> RunLoss:
        """Make a loss function ready to be run (`reads`: see `RunLoss`)."""
        if len(self._functions) == _MOST_FUNCTIONS:
            raise WindowError(
                f"run() was given {_MOST_FUNCTIONS + 1} different loss functions, and each gets "
                "its own test and graph: define the function once, before the loop, and pass what "
                "changes in the micro-batch"
            )
        self._functions.append(RunLoss(loss, self._ledger, reads=reads, **self._options))
        return self._functions[-1]

    def clear(self) -> None:
        """Forget all functions: their graphs leave the device's memory."""
        self._functions.clear()


def _identity(function: Any) -> list[Any]:
    """Return the ids of a function's code and of the objects that it reads now."""
    if isinstance(function, functools.partial):
        named = [(name, id(value)) for name, value in sorted(function.keywords.items())]
        return [*_identity(function.func), *map(id, function.args), *named]
    if isinstance(function, MethodType):
        return [id(function.__self__), *_identity(function.__func__)]
    if not isinstance(function, FunctionType):
        return [id(function)]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    cells = map(content_of, function.__closure__ or ())
    return list(map(id, (function.__code__, function.__globals__, *defaults, *cells)))


class RunLoss:
    """Runs forward, backward and addition of micro-batches by one loss function.

    `reads` is the user's own code inside `loss`, if `loss` is not the user's: changes of what it
    reads are looked for.
    """

    def __init__(
        self,
        loss: Callable[[Any], Any],
        ledger: Ledger,
        *,
        execute: Execute,
        audit: bool,
        reads: Callable[..., Any] | None = None,
    ) -> None:
        check_run_function(loss)
        models, sync = ledger.target.models, ledger.sync
        self.loss = loss
        self._ledger = ledger
        self._kind = ledger.target.device.type
        replicas = [
            m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)
        ]
        self._around = functools.partial(_around_call, self._kind, replicas)
        around = self._around  # not `self`: the function is held by what this object holds

        def call(_: Any, micro: Any) -> Any:
            with around(micro, traced=False):
                return loss(micro["micro"])

        self._call = call
        self.modules = _all_modules(models, reads or loss)
        """All modules that the function uses."""
        self._number = 0  # of the last window with a micro-batch of this function
        self._calls = 0  # in this window, before the one under way
        self._micro: Any = None  # of the call under way
        self._place: Place
        # Ranks that may have different numbers of micro-batches test alone.
        self._test = LossTest(
            self.modules,
            sync.group if sync.counts_must_agree else Group(),
            enabled=audit,
            shares_forwards=not sync.runs_alone,
        )
        this = proxy(self)
        self._step = MicroStep(
            self._call,
            None,
            modules=self.modules,
            ledger=ledger,
            precision=Full(),  # that of the loop
            execute=execute,
            prepare=lambda _: this._micro,  # as it was given: parts of it may belong on the host
        )
        self.executor = self._step.executor
        self.executor.guard(lambda _, micro: loss(micro["micro"]), lambda: this.as_read())

    def as_read(self) -> AbstractContextManager[None]:
        """Return the context in which the user's function is traced."""
        return self._around(self._micro, traced=True)

    def __call__(self, micro: Any, place: Place) -> Loss | Terms:
        """Add the gradient of a micro-batch to the window; return its loss without a graph."""
        is_on = torch.is_autocast_enabled(self._kind)
        autocast = torch.get_autocast_dtype(self._kind) if is_on else None
        self._micro, self._place = {"micro": micro, "autocast": autocast}, place
        try:
            # The function itself is tested, and hooks on models stop a graph.
            with unwatched(), torch.autocast(self._kind, enabled=False) if is_on else nullcontext():
                self._test_window()
                return self._added()
        finally:
            self._micro = None

    def _test_window(self) -> None:
        """Refuse a loss that does not add up; each test takes another micro-batch of its window."""
        place, before = self._place, self._number
        self._number = self._ledger.number
        begins_again = place.position == 0 and place.counts
        is_first = begins_again or self._number != before  # of this function
        # Micro-batches that do not count are calls too: ranks must test at the same one.
        self._calls = 0 if is_first else self._calls + 1
        if is_first and place.in_parts:
            self._test.begin_window()
        turn = self._test.turn % max(place.steps, default=1)
        if not self._test.is_due or not (place.last or self._calls >= turn):
            return
        call, function = self._micro, self._call  # not `self`, which holds what holds `run`

        def run(few: Any) -> Any:
            return function(None, {**call, "micro": few})

        self._test.test(run, call["micro"])

    def _added(self) -> Loss | Terms:
        ledger = self._ledger
        before = ledger.micro
        try:
            added = self._step.run(self._micro, self._place)
        except BaseException:
            was_added = ledger.micro is not before or self.executor.mode != "eager"
            if was_added and ledger.open is not None:
                ledger.broken = HALF_DONE
            raise
        with torch.no_grad():  # it has no graph, and needs none
            if SINGLE not in added.terms:
                return Terms(added.terms)
            term = added.terms[SINGLE]
            return Loss(term.total, term.units, extras=added.extras)


@contextmanager
def _around_call(
    kind: str, replicas: Sequence[nn.Module], micro: Any, *, traced: bool
) -> Iterator[None]:
    """Call the user's function under the autocast of `run`; if it is `traced`, without DDP."""
    dtype = micro["autocast"]
    with ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        for replica in replicas if traced else ():  # call the module inside of DDP directly
            stack.enter_context(replaced_attributes(replica, forward=replica.module))
        yield


def _all_modules(models: Sequence[nn.Module], loss: Any) -> nn.Module:
    """Return one module with all models, and with those that only the loss function knows.

    Those are what the function holds or names, and what the functions among these do: a GAN's
    generator is trained through a judge that another window trains.
    """
    inner = [m.module if isinstance(m, DistributedDataParallel) else m for m in models]
    known = {module for model in inner for module in model.modules()}
    more = []
    values = level = [loss]
    for _ in range(_LEVELS):
        level = [held for value in level if isinstance(value, _FUNCTIONS) for held in inside(value)]
        values = [*values, *level]
    for module in values:
        if isinstance(module, nn.Module) and known.isdisjoint(module.modules()):
            more.append(module)
            known.update(module.modules())
    return inner[0] if len(inner) == 1 and not more else nn.ModuleList([*inner, *more])
