"""Accumulator: exact gradient accumulation in your own loop, and `over`, the loop over a loader.

The loop says which micro-batch is the last of its window, and lets ranks that have run out of data
take part in the updates of the others.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, NoReturn, TypeGuard, TypeVar, overload
from weakref import WeakSet

import torch
from torch import Tensor, nn

from wholebatch.batch.lookahead_loader import NOTHING, Feed
from wholebatch.compile import Execute, check_execute
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.coupled.batchnorm.policies import Refuse
from wholebatch.coupled.coupling_layers import warn_of_spectral_norms
from wholebatch.coupled.loop_checks import LoopChecks
from wholebatch.errors import (
    EmptyWindowError,
    LossError,
    OptionError,
    RankError,
    StateError,
    WindowError,
)
from wholebatch.losses.loss import Loss, Terms, Units, check_total, check_units, mean_loss, terms_of
from wholebatch.make_window import make_window
from wholebatch.options import BatchNormPolicy, Close, Memory, as_close
from wholebatch.run_loss import Place, RunLoss
from wholebatch.window.autocast import Full
from wholebatch.window.close import ClipNorm, check_terms
from wholebatch.window.foreign_writes import Untouched, warn_of_empty_steps
from wholebatch.window.forward_state import ForwardState, restore_random
from wholebatch.window.model_and_optimizer import Scheduler
from wholebatch.window.window import HasWindow, Step, Turn, UnitsCount, graph_nodes

_log = logging.getLogger("wholebatch")
_MicroBatch = TypeVar("_MicroBatch")
_MOST_FUNCTIONS = 8
"""The most loss functions that one accumulator runs."""


@dataclass(frozen=True)
class Steps:
    """The micro-batches per window: a number, a schedule, or a function of the update.

    `changes` holds pairs of an update (or epoch) and the steps from there on.

    >>> Steps.of({0: 4, 800: 8}).at(update=799, epoch=0)
    4
    >>> Steps.of(by_epoch({0: 4, 8: 8})).at(update=5000, epoch=8)
    8
    >>> Steps.of(lambda update: min(4 + update // 100, 64)).at(update=800, epoch=0)
    12
    """

    changes: tuple[tuple[int, int], ...]
    per_epoch: bool = False
    function: Callable[[int], int] | None = None

    @staticmethod
    def of(steps: object) -> Steps:
        """Read what a user passes: a number, a schedule, or a function of the update."""
        if isinstance(steps, Steps):
            return steps
        if callable(steps):
            return Steps((), function=steps)
        if isinstance(steps, Mapping):
            return _schedule(steps, per_epoch=False)
        if not _is_whole(steps, least=1):
            raise OptionError(
                f"steps={steps!r}: must be a positive number of micro-batches, a schedule by "
                "update such as {0: 4, 800: 8}, wb.by_epoch({0: 4, 8: 8}), or a function of the "
                "update"
            )
        return Steps(((0, int(steps)),))

    def at(self, *, update: int, epoch: int) -> int:
        """Return the steps of the window that begins after `update` updates, in `epoch`."""
        if self.function is not None:
            steps = self.function(update)
            if not _is_whole(steps, least=1):
                raise OptionError(
                    f"steps= is a function that returns {steps!r} for update {update}: it must "
                    "return a positive number of micro-batches"
                )
            return int(steps)
        now = epoch if self.per_epoch else update
        return next(steps for start, steps in reversed(self.changes) if start <= now)


def by_epoch(schedule: Mapping[int, int]) -> Steps:
    """Return a schedule for `steps=` by epoch. One pass of `over` is an epoch.

    Args:
        schedule: Micro-batches per window from an epoch on: `{0: 4, 8: 16}`.
    """
    return _schedule(schedule, per_epoch=True)


def _is_whole(number: object, least: int) -> TypeGuard[int]:
    """True for a whole number of at least `least`."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        return False
    return int(number) >= least


def _schedule(schedule: Mapping[int, int], *, per_epoch: bool) -> Steps:
    what = "epoch" if per_epoch else "update"
    if 0 not in schedule:
        raise OptionError(f"steps={dict(schedule)!r}: must have an entry for {what} 0")
    for start, steps in schedule.items():
        for number, least in ((start, 0), (steps, 1)):
            if not _is_whole(number, least):
                raise OptionError(
                    f"steps={dict(schedule)!r}: {start!r}: {steps!r} must be an {what} (0 or "
                    "more) and a positive number of micro-batches"
                )
    changes = sorted((int(start), int(steps)) for start, steps in schedule.items())
    return Steps(tuple(changes), per_epoch)


class Accumulator(HasWindow):
    """Exact gradient accumulation in your own loop: one update per `steps` micro-batches.

    >>> import torch, wholebatch as wb
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> acc = wb.Accumulator(model, optimizer, steps=4, clip_norm=1.0)
    >>> loader = [torch.randn(2, 3) for _ in range(6)]        # the last window is a short one
    >>> for micro in acc.over(loader):
    ...     total = model(micro).square().sum()
    ...     step = acc.backward(total, units=len(micro))
    ...     if step is not None:
    ...         print(step.update, step.micro_batches, step.units)
    1 4 8.0
    2 2 4.0

    The last `backward` of a window makes the update of the undivided batch and returns its Step;
    the others return None. Without `over`, every `steps`-th `backward` is the last, and `flush()`
    closes a short last window.

    `acc.run(loss, micro)` takes the loss function instead of its result: forward, backward and
    addition run as one graph, at the speed of `WholeBatch`.

    Args:
        model: The model, or a list of models.
        optimizer: One optimizer or several. With None, a window ends with the whole gradient in
            `.grad`; you step and clear it.
        steps: Micro-batches per window. Or a schedule by update, `{0: 4, 800: 8}`, or by epoch,
            `wb.by_epoch({0: 4, 8: 8})`. Or a function of the number of updates made so far.
        clip_norm: Clip the gradient of the whole window to this norm; a list gives one norm per
            parameter group.
        scheduler: A learning-rate scheduler, or several. Each is stepped once per update;
            ReduceLROnPlateau gets the loss of the window.
        execute: How `run` computes a micro-batch: "eager", "compile" (one compiled graph), "graph"
            (the same, captured as a CUDA graph), or "auto", which chooses by the device and by how
            long the run takes.
        batchnorm: What to do with BatchNorm layers: "refuse", "freeze" (normalise with the running
            statistics) or "allow" (with those of each micro-batch). "exact" needs `WholeBatch`.
        memory: `wb.Memory(optimizer_state=...)`.
        audit: Test the first window: a sum must not be a mean, and samples must not depend on each
            other. In windows 2, 4, 8, ... the units of means, and all that `run` is given, are
            tested too. False skips the tests.
        close: `wb.Close(...)`, how a window ends.

    Attributes:
        epoch: Passes of `over` that have ended.
        last_step: The Step of the last update; None before the first.
        last_loss: The loss of the micro-batch that `run` was given last, without its graph.
    """

    _written_by: ClassVar[str] = "the loop"
    """Who must not write to an open window, for messages."""
    _closes_the_last: ClassVar[str] = "loop with over(loader)"
    """How the loop closes a short last window, for messages."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        *,
        steps: int | dict[int, int] | Steps | Callable[[int], int],
        clip_norm: ClipNorm = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        execute: Execute = "auto",
        batchnorm: BatchNormPolicy = "refuse",
        memory: Memory | None = None,
        audit: bool = True,
        close: Close | None = None,
    ) -> None:
        # First, since it also refuses to be copied.
        self._turn = Turn("Accumulator.backward() or run()")
        if batchnorm == "exact":
            raise OptionError(
                'batchnorm="exact": exact BatchNorm runs the batch undivided, and Accumulator '
                'does not run the forward pass: use WholeBatch, or another policy ("freeze", '
                '"allow")'
            )
        self._steps = Steps.of(steps)
        window = make_window(
            model,
            optimizer,
            clip_norm=clip_norm,
            scheduler=scheduler,
            memory=_without_budget(memory),
            close=as_close(close),
            audit=audit,
        )
        models = window.target.models
        self._window = window
        self._execute = check_execute(execute, window.target.device)
        self._untouched = Untouched(window, self._written_by)
        if self._written_by == "the loop":
            warn_of_empty_steps(self, window.target.optimizers)
        self._batchnorms = [choose_batchnorm(batchnorm, model) for model in models]
        for one in models:
            warn_of_spectral_norms(one)
        self._refusing = [one for one in self._batchnorms if isinstance(one, Refuse) and one.norms]
        self._audits = audit
        self._checks = LoopChecks(models, audit=audit)
        self._functions: dict[Any, RunLoss] = {}
        self.epoch = 0
        self.last_step: Step | None = None
        self.last_loss: Loss | None = None
        self._counts = True  # False while a micro-batch only takes part in others' collectives
        self._places = 0  # micro-batches of this window so far, also those without a backward
        self._size = 0  # how many it will have
        self._driver: Feed | None = None
        self._is_last = False
        self._place_done = False
        self._feed: Feed | None = None
        self._resume: dict[str, Any] | None = None
        self._before: ForwardState | None = None  # of the models, before a stand-in's forward
        self._announced: UnitsCount | None = None  # of the windows, if they are announced
        # The others of the loop, with their updates when this window began.
        self._beside: dict[Accumulator, int] = {}
        self._earlier: Sequence[Accumulator] = ()  # those whose windows close before this one's
        self._guards: list[Any] = []  # hooks on the models, from their update to the next item
        self._watch(self._next_size())
        _accumulators.add(self)

    def __del__(self) -> None:
        self._warn_of_open_window()

    def _warn_of_open_window(self) -> None:
        window = getattr(getattr(self, "_window", None), "open", None)
        if window is None or not window.micro_batches:
            return
        # After an error, which says enough, no window is expected to be closed.
        if not self._turn.failed and not hasattr(sys, "last_type"):
            _log.warning(
                "%s was deleted with an open window (micro-batches in it: %d), which made no "
                "update. Close a short last window with flush(), or %s, which closes it",
                type(self).__name__,
                window.micro_batches,
                self._closes_the_last,
            )

    def __repr__(self) -> str:
        target = self._window.target
        models = "+".join(type(model).__name__ for model in target.models)
        optimizers = "+".join(type(one).__name__ for one in target.optimizers)
        steps, updates = self.steps, self.updates
        return f"Accumulator({models}, {optimizers or None}, steps={steps}, updates={updates})"

    # ------------------------------------------------------------- the window

    @property
    def steps(self) -> int:
        """Micro-batches of the window that is open, or of the next one."""
        return self._size if self._places else self._next_size()

    @steps.setter
    def steps(self, steps: int | dict[int, int] | Steps | Callable[[int], int]) -> None:
        """Set the micro-batches of the next window."""
        self._steps = Steps.of(steps)

    @property
    def micro_batches(self) -> int:
        """Micro-batches that the open window holds."""
        return self._window.now.micro_batches

    def updates_per_epoch(self, loader: Sized) -> int:
        """Return how many updates one pass of `over(loader)` makes, a short last window included.

        It is `math.ceil(len(loader) / steps)`, or follows the schedule in `steps=` from the next
        window on. Use it to give a learning-rate scheduler its number of updates.

        >>> import torch, wholebatch as wb
        >>> model = torch.nn.Linear(3, 1)
        >>> acc = wb.Accumulator(model, torch.optim.SGD(model.parameters()), steps=4)
        >>> acc.updates_per_epoch(range(10))
        3

        Args:
            loader: What `over` will loop over. It must have a length, in micro-batches.
        """
        micro_batches, updates = len(loader), 0
        while micro_batches > 0:
            at = self._window.updates + updates
            micro_batches -= self._steps.at(update=at, epoch=self.epoch)
            updates += 1
        return updates

    def _next_size(self) -> int:
        return self._steps.at(update=self._window.updates, epoch=self.epoch)

    @overload
    def backward(
        self, total: Loss | Terms, *, more: bool = ..., last: bool | None = ...
    ) -> Step | None: ...

    @overload
    def backward(
        self, total: Tensor, units: Units, *, more: bool = ..., last: bool | None = ...
    ) -> Step | None: ...

    @overload
    def backward(
        self, *, mean: Tensor, units: Units, more: bool = ..., last: bool | None = ...
    ) -> Step | None: ...

    def backward(
        self,
        total: Tensor | Loss | Terms | None = None,
        units: Units | None = None,
        *,
        mean: Tensor | None = None,
        more: bool = False,
        last: bool | None = None,
    ) -> Step | None:
        """Add one micro-batch's gradient; the window's last backward closes it.

        Args:
            total: The loss of the micro-batch as a sum over `units`, or a `wb.Loss`, which has
                both; or `wb.Loss.terms(...)`, after `announce`.
            units: How many units the loss is over: samples, tokens or weights. If a micro-batch
                has several backwards, give the same units with each; they are counted once.
            mean: The loss as a mean over `units`, instead of `total`.
            more: True if another backward of the same micro-batch follows.
            last: Outside of `over`, True if this micro-batch is the last of its window and False if
                it is not, whatever `steps` says.

        Returns:
            The Step if the window was closed, else None.
        """
        with self._turn:
            if not torch.is_grad_enabled():
                raise WindowError(
                    "backward() under torch.no_grad() or torch.inference_mode(), where there are "
                    "no gradients: compute the loss and call backward() outside of them"
                )
            is_last = self._begin_backward(last)
            if self._checks.active and not self._window.now.owners:
                self._watch(self._size)
            if self._beside:
                self._refuse_moved(lambda: _leaves_of(total if mean is None else mean))
            reduces = is_last and not more
            how: Any = {"in_parts": self._in_parts, "steps": self._size}
            if isinstance(total, Terms) and self._window.now.known is not None:
                self._checks.check(total, **how)
                self._window.add_loss(total, last=reduces, counts=self._counts)
            else:
                summed, of = given_loss(total, units, mean)  # refuses terms that nobody announced
                if self._checks.active or self._checks.tests_units or isinstance(total, Loss):
                    self._checks.check(total, of, mean=mean, **how)
                self._window.add(summed, of, last=reduces, counts=self._counts)
            self._window.current.are_units_given = True
            return self._end_backward(is_last, more)

    def run(
        self,
        loss: Callable[[Any], Any],
        micro: Any,
        *,
        more: bool = False,
        last: bool | None = None,
    ) -> Step | None:
        """Run forward and backward of one micro-batch and add its gradient, as one graph.

        ```python
        def loss(micro):
            return wb.cross_entropy(model(micro["x"]), micro["y"])

        for micro in acc.over(loader):
            step = acc.run(loss, micro)
        ```

        Where a graph is not possible, eager code makes the same update. The function is tested
        like that of `WholeBatch`, before the first window and in windows 2, 4, 8, ... It runs under
        the autocast that `run` is called with. `last_loss` is the loss of this micro-batch, for
        logging, with the tensors of `wb.Loss(total, units, extras={...})`.

        Args:
            loss: A function of the micro-batch that returns a `wb.Loss`, or a tensor of per-unit
                losses. Define it once, before the loop.
            micro: The micro-batch: tensors, or any structure of them.
            more: As for `backward`.
            last: As for `backward`.

        Returns:
            The Step if the window was closed, else None.
        """
        if not torch.is_grad_enabled():
            raise WindowError(
                "run() under torch.no_grad() or torch.inference_mode(), where there are no "
                "gradients: call it outside of them; to evaluate, call the loss function itself"
            )
        with self._turn:
            self._window.sync.before_forwards()
            is_last = self._begin_backward(last)
            function = self._functions.get(_key_of(loss)) or self._prepare(loss)
            if self._beside:
                self._refuse_moved(lambda: set(map(id, function.modules.parameters())))
            if self._window.now.known is not None:
                raise LossError(
                    "announce() with run(): run() takes a loss of one term only. Run the forward "
                    "pass yourself, and give its wb.Loss.terms(...) to backward()"
                )
            place = Place(
                index=self._places,
                in_parts=self._in_parts,
                steps=self._planned_steps,
                last=is_last and not more,
                counts=self._counts,
            )
            self.last_loss = function(micro, place)
            return self._end_backward(is_last, more)

    def _prepare(
        self, loss: Callable[[Any], Any], reads: Callable[..., Any] | None = None
    ) -> RunLoss:
        """Make a loss function ready to be run (`reads`: see `RunLoss`)."""
        if len(self._functions) == _MOST_FUNCTIONS:
            raise WindowError(
                f"run() was given {_MOST_FUNCTIONS + 1} different loss functions, and each gets "
                "its own test and graph: define the function once, before the loop, and pass what "
                "changes in the micro-batch"
            )
        function = RunLoss(
            loss,
            self._window,
            execute=self._execute,
            precision=Full(),
            audit=self._audits,
            untouched=self._untouched,
            reads=reads,
        )
        self._functions[_key_of(loss)] = function
        return function

    def _begin_backward(self, last: bool | None) -> bool:
        """Begin a window at its first backward; return True if the micro-batch is the last of it.

        A second backward for one micro-batch is refused.
        """
        last = self._last_of(last)
        if last is not None and self._driver is not None:
            raise WindowError(
                f"last={last} inside over(): over() already knows the window's last micro-batch. "
                "Leave last= out, or write the loop without over()"
            )
        if self._place_done and self._driver is not None:
            raise WindowError(
                "a second backward for one micro-batch: pass more=True on all but its last"
            )
        if self._places == 0 and self._driver is None:
            self._open_place()
        if last is False:
            self._size = max(self._size, self._places + 2)
        self._window.now.refuse_broken()
        self._untouched.check()
        if last is not None:
            return last
        return self._is_last if self._driver is not None else self._places + 1 >= self._size

    def _last_of(self, last: bool | None) -> bool | None:
        """Return True if a micro-batch is the last of its window, None if `steps` says it."""
        return last

    def _end_backward(self, is_last: bool, more: bool) -> Step | None:
        """Count a micro-batch after its backwards; the last one closes the window."""
        self._untouched.remember()
        if more:
            self._window.now.more_of_micro_batch = True
            return None
        if self._checks.active or self._checks.tests_units:
            self._checks.end_micro_batch()
        if self._counts:
            self._window.micro_batch_done()
        self._places += 1
        self._place_done = True
        return self._close() if is_last else None

    def _refuse_moved(self, used: Callable[[], set[int]]) -> None:
        """Refuse a loss that uses a model which another accumulator has updated in this window.

        `used()` returns the ids of the parameters that the loss is computed with.
        """
        now = {other: other.updates for other in self._beside}
        self._beside = self._beside if self._places else now
        for other in now:
            if now[other] != self._beside[other]:
                for model in other._window.target.models:
                    if not used().isdisjoint(map(id, model.parameters())):
                        self._raise_moved(model, other)

    def _raise_moved(self, model: nn.Module, other: Accumulator) -> NoReturn:
        if other.steps != self.steps:
            raise WindowError(
                f"{type(model).__name__} was updated when {self._places} of {self._size} "
                "micro-batches of another model's window were done: accumulators in one wb.over "
                f"need the same steps, and these have {other.steps} and {self.steps}. To update a "
                "critic more often than its generator (n_critic), give the critic a loop of its own"
            )
        raise WindowError(
            f"{type(model).__name__} was updated when {self._places} of {self._size} micro-batches "
            "of another model's window were done, and the next micro-batch uses it: that window "
            "would mix the old and the new weights. Compute all losses of a micro-batch before "
            "its first backward(), and call backward() on a loss before the backwards that update "
            "its models. With run(), give each accumulator its own loop"
        )

    def _guard(self) -> None:
        """Refuse to call updated models again while another open window uses them."""
        waiting = [one for one in self._beside if one._places and not one._place_done]

        def refuse(model: nn.Module, _: Any) -> None:
            for one in waiting:
                if model.training and not one._place_done:
                    one._raise_moved(model, self)

        for model in self._window.target.models if waiting else ():
            self._guards.append(model.register_forward_pre_hook(refuse))

    def announce(self, units: Mapping[str, Units]) -> None:
        """Announce the units of a window by term, before its first backward.

        `units` are those of all micro-batches that this rank will add to the window; they are
        summed over the ranks, so every rank announces every window (and has data for the first).

        ```python
        acc.announce({"policy": masks.sum(), "kl": len(masks)})
        for micro in micros:
            acc.backward(wb.Loss.terms({"policy": policy(micro), "kl": (kl(micro), 0.05)}))
        ```
        """
        if self._window.open is not None:
            raise WindowError(
                "announce() in an open window: its units must be known before its first backward"
            )
        if self._beside and self._window.sync.ranks > 1:
            raise WindowError(
                "announce() on several ranks, with several accumulators in one loop: a rank "
                "without data would not know which accumulator comes next; give each accumulator "
                "its own loop"
            )
        if not isinstance(units, Mapping) or not units:
            raise OptionError(f"announce({units!r}): must be the units by term, {{name: units}}")
        self._announced = self._announced or UnitsCount(lambda given: given, self._window.sync)
        self._window.begin(known=self._announced([units]))

    @property
    def _in_parts(self) -> bool:
        """True if this micro-batch is not the whole global batch."""
        return self._size > 1 or self._window.sync.ranks > 1

    @property
    def _planned_steps(self) -> int:
        """The number of micro-batches of the window; 0 if it is not known before its end."""
        return self._size

    def _watch(self, size: int) -> None:
        """Check the forwards of a first window in parts; none with collectives is repeated."""
        sync = self._window.sync
        if size > 1 or sync.ranks > 1:
            alone = not sync.counts_must_agree and not sync.grows_own_graph
            self._checks.watch(calls=alone)

    def flush(self) -> Step | None:
        """Close a short last window and return its Step, or None if the window is empty."""
        with self._turn:
            if self._window.open is None:
                self._places = 0
                return None
            self._end_more()
            return self._close()

    def discard(self) -> None:
        """Drop the open window; the next micro-batch begins a new one."""
        self._window.discard()
        self._untouched.forget()
        self._checks.end_micro_batch()
        self._places = 0
        if self._driver is None:
            self._window.sync.restore()

    def _close(self) -> Step:
        self._untouched.check(rates=True)
        if self._in_parts:
            self._checks.end_window(self._window.now.micro_batches)
        self._restore_buffers()
        self._places = 0
        if self._driver is not None:
            self._refuse_other_order()
            self._guard()
        self.last_step = self._close_window()
        self._watch(self._next_size())
        return self.last_step

    def _refuse_other_order(self) -> None:
        """Refuse to close before an accumulator that `over` was given before this one."""
        if any(not one._place_done for one in self._earlier):
            raise WindowError(
                "wb.over on several ranks: the last backwards of a window must come in the order "
                "in which the accumulators were given, since a rank without data closes its "
                "windows in that order: give them to wb.over in the order of their backwards"
            )

    def _close_window(self, **how: Any) -> Step:
        self._untouched.forget()
        return self._window.close(**how)

    # --------------------------------------------------------------- the loop

    def over(
        self, loader: Iterable[_MicroBatch], *, continue_window: bool = False
    ) -> Iterator[_MicroBatch]:
        """Yield the loader's micro-batches, in windows of `steps`; the tail makes a short window.

        `continue_window=True` continues a window that an earlier loop left open.
        """
        return over(loader, self, continue_window=continue_window)

    def _may_start(self, continue_window: bool) -> None:
        if self._window.now.owners and not continue_window and self._resume is None:
            raise WindowError(
                f"a window is still open with {self._places} of {self._size} micro-batches from "
                "an earlier loop: flush() to close it, discard() to drop it, or "
                "over(loader, continue_window=True) to go on with it"
            )

    def _open_place(self) -> None:
        """Begin a window: set its size, and refuse a BatchNorm that is in train mode by now."""
        self._size = self._next_size()
        if self._driver is not None:
            self._window.sync.before_forwards()
        self._checks.begin_window(self._window.number)
        self._watch(self._size)
        for policy in self._refusing:
            policy.begin_window()

    def _enter_place(self, *, is_last: bool) -> None:
        """Begin a micro-batch of `over`, and with the first one a window."""
        if self._places == 0:
            self._open_place()
        if self._guards:
            self._unguard()
        self._is_last = is_last
        self._place_done = False

    def _unguard(self) -> None:
        while self._guards:
            self._guards.pop().remove()

    def _stand_in(self, weightless: bool) -> None:
        """Set whether the next micro-batch only takes part in the others' collectives.

        Its forward leaves no trace: what it changes is put back before the window closes.
        """
        self._counts = not weightless
        self._restore_buffers()
        if weightless:
            self._before = ForwardState(*self._window.target.models)

    def _restore_buffers(self) -> None:
        if self._before is not None:
            self._before.restore()
        self._before = None

    def _leave_place(self) -> None:
        """End the body of the loop. A body without a backward counts as a micro-batch too."""
        if self._place_done:
            return
        self._end_more()
        self._places += 1
        if not self._is_last:
            return
        if self._window.open is not None or self._window.sync.ranks > 1:
            self._join()
            return
        self._places = 0
        if self._window.options.zero_units == "raise":
            raise EmptyWindowError(
                f"none of the {self._size} micro-batches of this window was given to backward() or "
                "run() of the accumulator, so there is no gradient to update with: call "
                "acc.backward(mean=loss, units=...) in place of loss.backward(). If all "
                "micro-batches of a window may be left out, pass close=wb.Close(zero_units='skip')"
            )
        self._window.skipped += 1

    def _end_more(self) -> None:
        """Count a micro-batch whose last backward, after more=True, did not come."""
        if self._window.now.more_of_micro_batch:
            self._window.micro_batch_done()

    def _join(self) -> None:
        """Take part in a window of the other ranks, having nothing more to add."""
        if self._window.open is not None:
            self._close()
            return
        self._places = 0
        known = None if self._announced is None else self._announced([])
        self.last_step = self._window.join(known)

    # ----------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from; save it with those of the model and the optimizer.

        Call it between windows: inside `over`, after the backward that returned a Step.
        """
        if self._driver is not None and not self._place_done and self._window.open is None:
            raise StateError(
                "state_dict() inside over() before the backward of this micro-batch: the "
                "micro-batch would be lost. Save after a Step"
            )
        saved = self._window.state_dict("Accumulator")
        feed = self._feed
        goes_on = feed is not None and not feed.is_exhausted
        saved.update(epoch=self.epoch, feed=feed.state_dict() if feed and goes_on else None)
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from a `state_dict`; call it after the model and optimizer are loaded.

        Pass the next `over(loader)` the same data from its start: it continues at the saved
        position. The random generators are restored.
        """
        if self._driver is not None:
            raise WindowError("load_state_dict() inside over(): leave the loop first")
        self._window.load_state_dict("Accumulator", saved)
        self._untouched.forget()
        self.epoch = saved["epoch"]
        self._places = 0
        self._feed = None
        self._resume = saved


_accumulators: WeakSet[Accumulator] = WeakSet()


@atexit.register
def _warn_of_open_windows() -> None:
    """Warn at the end of a script: later, the names of this module may be gone."""
    for one in list(_accumulators):
        one._warn_of_open_window()
        one._turn.failed = True  # nothing more is expected of it


def _key_of(loss: object) -> Any:
    """Return the function itself, or the id of one that has no hash (a dataclass)."""
    try:
        hash(loss)
    except TypeError:
        return id(loss)
    return loss


def _without_budget(memory: Memory | None) -> Memory:
    if memory is None:
        return Memory()
    if not isinstance(memory, Memory) or memory.budget is not None:
        raise OptionError(
            f"memory={memory!r}: Accumulator does not run the forward pass, so it cannot keep a "
            "budget; give wb.Memory(optimizer_state=...), or use WholeBatch"
        )
    return memory


def given_loss(
    total: Tensor | Loss | Terms | None = None,
    units: Units | None = None,
    mean: Tensor | None = None,
) -> tuple[Tensor, Units]:
    """Return the loss of a micro-batch as a sum with its graph, and its units.

    It is given as a sum, a `wb.Loss` or a mean.

    >>> import torch
    >>> weight = torch.ones((), requires_grad=True)
    >>> given_loss(weight * 6, units=3)[0].item()
    6.0
    >>> given_loss(mean=weight * 2, units=3)[0].item()
    6.0
    """
    if mean is not None and total is not None:
        raise LossError(
            "backward() with both total and mean=: total is the sum over the units, mean is "
            "the mean over them; pass one of the two"
        )
    if isinstance(total, Loss):
        if units is not None:
            raise LossError("units= with a wb.Loss, which has its own units: leave units= out")
        return total.total, total.units
    if isinstance(total, Terms):
        check_terms(None, total.by_name)  # refuses: a stream cannot know the terms' totals
    if total is None and mean is None:
        raise LossError(
            "backward() without a loss: give total, the sum over its units, or mean=, the mean "
            "over them, with units="
        )
    if units is None:
        raise LossError(
            "backward(mean=...) without units=: pass the number of samples, tokens or weights "
            "that it is a mean over"
            if mean is not None
            else "backward(total) without units=: pass the number of samples, tokens or "
            "weights that total is a sum over. If it is a mean, call backward(mean=..., "
            "units=...)"
        )
    if mean is None:
        return check_total(total), check_units(units)
    found = mean_loss(mean, units)
    return found.total, found.units


def _leaves_of(loss: Any) -> set[int]:
    """Return the ids of the parameters that the graph of a loss leads to."""
    terms = terms_of(loss).values() if isinstance(loss, Loss | Terms) else ()
    return {
        id(getattr(node, "variable", None))
        for node in graph_nodes([t.total for t in terms] or [loss])
    }


def over(
    loader: Iterable[_MicroBatch], *accumulators: Accumulator, continue_window: bool = False
) -> Iterator[_MicroBatch]:
    """Loop over one loader with several accumulators, such as the two of a GAN.

    Args:
        loader: Any iterable of micro-batches.
        accumulators: The accumulators to drive.
        continue_window: Continue a window that is open, instead of refusing it.
    """
    if not accumulators:
        raise OptionError("wb.over(loader): give at least one Accumulator")
    _refuse_nested(accumulators)
    for accumulator in accumulators:
        accumulator._may_start(continue_window)
    models = [m for accumulator in accumulators for m in accumulator._window.target.models]
    if len({id(model) for model in models}) != len(models):
        raise OptionError(
            "two accumulators over the same model in one wb.over: give one Accumulator a list of "
            "optimizers instead"
        )
    return _drive(loader, accumulators)


_NESTED = (
    "over() inside over() on the same model: both would add to its gradients; use one loop, or "
    "wb.over(loader, first, second) for several accumulators"
)


def _refuse_nested(accumulators: Sequence[Accumulator]) -> None:
    """Refuse a loop over models that another loop is in the middle of.

    One that was left between two windows, by `next()` instead of `for`, is over.
    """
    models = {model for one in accumulators for model in one._window.target.models}
    for other in list(_accumulators):
        if other._driver is None or models.isdisjoint(other._window.target.models):
            continue
        is_between = other._place_done and other._window.open is None
        if not is_between or other._beside or other._window.sync.ranks > 1:
            raise WindowError(_NESTED)
        other.epoch += not other._driver.has_next()
        other._driver = None


def _drive(loader: Iterable[Any], accumulators: Sequence[Accumulator]) -> Iterator[Any]:
    _refuse_nested(accumulators)  # another loop may have started meanwhile, as in zip()
    feed = _feed_for(loader, accumulators)
    for accumulator in accumulators:
        accumulator._driver = accumulator._feed = feed
        accumulator._beside = {one: one.updates for one in accumulators if one is not accumulator}
    try:
        shared = [one for one in accumulators if one._window.sync.ranks > 1]
        if shared:
            yield from _shared_windows(feed, accumulators, shared)
        else:
            yield from _own_windows(feed, accumulators)
        for accumulator in accumulators:
            accumulator.epoch += 1
    finally:
        for accumulator in accumulators:
            if accumulator._driver is not feed:
                continue  # another loop has begun
            accumulator._driver = None
            accumulator._beside, accumulator._earlier = {}, ()
            accumulator._unguard()
            accumulator._stand_in(False)
            accumulator._window.sync.restore()


def _own_windows(
    feed: Feed, accumulators: Sequence[Accumulator], until: Accumulator | None = None
) -> Iterator[Any]:
    """Yield micro-batches to the loader's end, or to the end of one accumulator's window."""
    while feed.take():
        for one in accumulators:
            one._enter_place(is_last=one._places + 1 >= one.steps or not feed.has_next())
        yield feed.current
        if any(one._driver is not feed for one in accumulators):
            raise WindowError(_NESTED)
        for one in accumulators:
            one._leave_place()
        if until is not None and until._places == 0:
            return


def _shared_windows(
    feed: Feed, accumulators: Sequence[Accumulator], shared: Sequence[Accumulator]
) -> Iterator[Any]:
    """Yield micro-batches until no rank has any; all ranks meet before each window.

    `shared` are the accumulators of several ranks. A rank without data takes part in the windows
    of the others. Where forwards run collectives, every rank runs as many as the one with the most
    micro-batches: its last one again, with weight zero and its buffers put back.
    """
    lead, sync = shared[0], shared[0]._window.sync
    equal = any(one._window.sync.counts_must_agree for one in shared)
    if equal and len(accumulators) > 1:
        raise OptionError(
            "wb.over with several accumulators on a sharded model: every rank would have to run "
            "the forwards in the same order. Give one Accumulator a list of optimizers (for "
            "DeepSpeed engines: one loop each)"
        )
    for index, one in enumerate(shared):
        one._earlier = shared[:index]
    last_item: Any = NOTHING
    is_first = True
    while True:
        _refuse_out_of_step(shared)
        own = feed.look_ahead(lead.steps - lead._places if equal else 1)
        most, fewest = sync.meet(own)
        if most == 0:
            feed.take()  # it takes note of its end
            return
        if fewest == 0 and is_first and (equal or len(shared) > 1):
            why = "a sharded model needs every rank in every forward"
            raise RankError(
                "a rank has no micro-batch for the first window, and "
                f"{why if equal else 'several accumulators in one loop need it on every rank'}: "
                "give every rank at least one"
            )
        is_first = False
        for one in shared:
            one._window.sync.before_forwards()
        if own == 0 and not equal:
            for one in shared:
                one._join()
        elif not equal:
            yield from _own_windows(feed, accumulators, until=lead)
        for index in range(most if equal else 0):
            last_item = feed.current if feed.take() else last_item
            lead._enter_place(is_last=index == most - 1)
            lead._stand_in(index >= own)
            yield last_item
            lead._leave_place()
            lead._stand_in(False)


def _refuse_out_of_step(shared: Sequence[Accumulator]) -> None:
    """Refuse accumulators of one loop whose windows do not begin and end together."""
    if len({(one.steps, one._places) for one in shared}) > 1:
        steps = " and ".join(str(one.steps) for one in shared)
        raise WindowError(
            f"wb.over on several ranks, with accumulators of {steps} steps, or with a flush() or "
            "discard() of one of them: the ranks meet before each window, so all windows of a loop "
            "must begin and end together; give them the same steps, or a loop for each"
        )


def _feed_for(loader: Iterable[Any], accumulators: Sequence[Accumulator]) -> Feed:
    saved = next((a._resume for a in accumulators if a._resume is not None), None)
    for accumulator in accumulators:
        accumulator._resume = None
    if saved is not None:
        restore_random(saved["random"])  # whatever was drawn since it was loaded
        return Feed(loader, saved["feed"])
    before = accumulators[0]._feed
    # An iterator goes on where the last loop left it; the item looked ahead at is still there.
    if before is not None and before.loader is loader and isinstance(loader, Iterator):
        return before
    return Feed(loader)
