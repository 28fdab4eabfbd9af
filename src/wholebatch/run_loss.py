"""Run the loss function of your own loop as one graph: forward, backward and addition.

`Accumulator.run` is given the function instead of its result, so it can do what `WholeBatch` does:
test that the loss adds up, and run forward, backward and addition as one recorded graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.compile import Execute
from wholebatch.compile.captured_state import FUNCTIONS, reached
from wholebatch.coupled.additivity import AdditivityTest, GatheredSamples, UnmovedLoss, WindowData
from wholebatch.coupled.loop_checks import unwatched
from wholebatch.coupled.mean_units import MeanUnits
from wholebatch.errors import OptionError
from wholebatch.losses.loss import SINGLE, Loss, as_loss, refuse_in_parts
from wholebatch.window.autocast import Precision
from wholebatch.window.foreign_writes import Untouched
from wholebatch.window.forward_state import replaced_attributes
from wholebatch.window.window import Window, is_tested_window


@dataclass(frozen=True)
class Place:
    """The place of a micro-batch in its window."""

    index: int
    """The number of micro-batches of its window before it."""
    in_parts: bool
    """True if it is not the whole global batch."""
    steps: int
    """The number of micro-batches of the window; 0 if it is not known before its end."""
    last: bool
    """True if its backward is the last one of the window, which reduces the gradients."""
    counts: bool
    """False if it only takes part in the other ranks' collectives."""


class RunLoss:
    """Runs forward, backward and addition of micro-batches by one loss function.

    `reads` is the user's own code inside `loss`, if `loss` is not the user's: changes of what it
    reads are looked for.
    """

    def __init__(
        self,
        loss: Callable[[Any], Any],
        window: Window,
        *,
        execute: Execute,
        precision: Precision,
        audit: bool,
        untouched: Untouched,
        reads: Callable[..., Any] | None = None,
    ) -> None:
        if not callable(loss):
            raise OptionError(
                f"run({loss!r}, micro): must be a function of the micro-batch that returns a "
                "wb.Loss; a loss that is computed already goes to backward()"
            )
        _refuse_other_arguments(loss)
        models, sync = window.target.models, window.sync
        self._window, self._precision, self._audits = window, precision, audit
        self._untouched = untouched
        self._kind = window.target.device.type
        self._call = _on_micro_batch(loss, models, reads or loss, self._kind)
        self.modules = _all_modules(models, reads or loss)
        """All modules that the function uses."""
        self._number = 0  # of the last window with a micro-batch of this function
        self._micro: Any = None  # of the call under way
        self._place: Place
        self._means = MeanUnits()
        self._gathered: GatheredSamples | None = None  # as `_unmoved`
        self._unmoved: UnmovedLoss | None = None  # of the window that is open, if it is tested
        # Ranks that may have different numbers of micro-batches test alone.
        self._test = AdditivityTest(
            self.modules,
            sync if sync.counts_must_agree else None,
            enabled=audit,
            shares_forwards=sync.counts_must_agree or sync.grows_own_graph,
            loss=self._call,
            given=nn.ModuleList(models),
        )
        from wholebatch.compile.micro_step import Executor  # Not needed to import wholebatch.

        self.executor = Executor(
            execute,
            model=self.modules,
            loss=self._call,
            window=window,
            precision=precision,
            device=window.target.device,
            eager=self._eager_step,
        )
        self._replicas = [
            one for m in models for one in m.modules() if isinstance(one, DistributedDataParallel)
        ]
        self.executor.guard(lambda _, micro: loss(micro["micro"]), self.as_read)

    @contextmanager
    def as_read(self) -> Iterator[None]:
        """Be in the state in which the user's function is traced."""
        dtype = self._micro["autocast"]
        with ExitStack() as stack:
            if dtype is not None:
                stack.enter_context(torch.autocast(self._kind, dtype=dtype))
            for one in self._replicas:  # call the module inside of DDP directly
                stack.enter_context(replaced_attributes(one, forward=one.module))
            yield

    def __call__(self, micro: Any, place: Place) -> Loss:
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
        """Refuse a loss that does not add up, in windows 1, 2, 4, 8, ...

        The first test takes the first micro-batch of its window, the next test another one.
        """
        place, before = self._place, self._number
        self._number = self._window.number
        is_first = place.index == 0 or self._number != before  # of this function
        if is_first:
            self._unmoved = self._gathered = None
            self._means.begin_window()
        elif self._unmoved is not None and place.last:
            with self._precision.forward():
                self._unmoved.check()
        begins = is_first and place.in_parts
        if begins:
            self._test.begin_window(self.executor.changed())
        is_tested, is_alone = self._test.is_due, self._window.sync.ranks == 1
        if begins and is_tested and is_alone:  # A forward may meet other ranks.
            self._gathered = GatheredSamples()
        if not is_tested and self._gathered is None:
            return
        given = self._micro

        def run(few: Any) -> Any:
            return self._call(None, {**given, "micro": few})

        with self._precision.forward():
            if is_tested and (place.last or place.index >= self._test.turn % max(place.steps, 1)):
                data = WindowData(given["micro"], [given["micro"]], steps=[place.steps])
                self._test.test(run, data)
            if begins and is_tested and is_alone and not place.last:
                self._unmoved = UnmovedLoss(self.modules, run, given["micro"])
            if self._gathered is not None:
                self._gathered.add(given["micro"])
                if place.last:
                    self._test.test_gathered(run, self._gathered, given["micro"])

    def _added(self) -> Loss:
        window = self._window
        entered = len(window.now.owners)
        try:
            made = self.executor.micro_step(self._micro)
        except BaseException:
            was_added = len(window.now.owners) != entered or self.executor.mode != "eager"
            if was_added and window.open is not None:
                window.open.broken = True  # some gradients may be in, and others not
            raise
        with torch.no_grad():  # it has no graph, and needs none
            return Loss(made.totals[SINGLE], made.units[SINGLE], extras=made.extras)

    def _eager_step(self, _: Any, function: Callable[[Any, Any], Any]) -> Loss:
        """Run the micro-step on the micro-batch as it was given: parts may belong on the host."""
        place = self._place
        with self._precision.window():
            with self._precision.forward():
                loss = as_loss(function(None, self._micro))
            if place.in_parts and self._audits:
                refuse_in_parts(loss)
                if place.counts and is_tested_window(self._window.number):
                    self._means.add_loss(loss)
            if self.executor.is_eager:
                self._untouched.check()  # the loss function may have written to the window
            self._window.add_loss(loss, last=place.last, counts=place.counts)  # refuses terms
        assert isinstance(loss, Loss)
        return loss


def _refuse_other_arguments(loss: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called with the micro-batch alone."""
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # a function of C without a signature
        return
    try:
        signature.bind(None)
    except TypeError:
        raise OptionError(
            f"run() calls loss(micro), and {getattr(loss, '__name__', loss)!s} takes "
            f"({', '.join(signature.parameters)}): "
            "give a function of the micro-batch alone, which uses the model of your loop"
        ) from None


def _on_micro_batch(
    loss: Callable[[Any], Any], models: Sequence[nn.Module], reads: Callable[..., Any], kind: str
) -> Callable[..., Any]:
    """Return the function as one of `(model, micro)`, under the autocast it was called with."""
    replicas = [
        m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)
    ]

    def call(_: Any, micro: Any, reads: Any = reads) -> Any:
        dtype = micro["autocast"]
        with ExitStack() as stack:
            if dtype is not None:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            if replicas and torch._C._len_torch_dispatch_stack():  # it is being traced
                for one in replicas:  # call the module inside of DDP directly
                    stack.enter_context(replaced_attributes(one, forward=one.module))
            return loss(micro["micro"])

    # What the user's function reads is looked at for changes; our own functions are not.
    call.__module__ = getattr(reads, "__module__", None) or "__main__"
    return call


def _all_modules(models: Sequence[nn.Module], loss: Any) -> nn.Module:
    """Return one module with all models, and with those that only the loss function knows.

    Those are what the function reaches, by itself or by the functions that it names: a GAN's
    generator is trained through a judge that another window trains.
    """
    inner = [m.module if isinstance(m, DistributedDataParallel) else m for m in models]
    known = {module for model in inner for module in model.modules()}
    more = []
    values = [value for _, value in reached(loss)]
    values += [v for one in values if isinstance(one, FUNCTIONS) for _, v in reached(one)]
    for module in values:
        if isinstance(module, nn.Module) and known.isdisjoint(module.modules()):
            more.append(module)
            known.update(module.modules())
    return inner[0] if len(inner) == 1 and not more else nn.ModuleList([*inner, *more])
