"""Accumulator: exact gradient accumulation in your own loop, and `over`, the loop over a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from wholebatch.audit.foreign_writes import refuse_unreduced_steps, warn_of_empty_steps
from wholebatch.audit.layers import warn_of_spectral_norms
from wholebatch.audit.own_loop import OwnLoop
from wholebatch.compile import Execute, check_execute
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.errors import EmptyWindowError, OptionError, WindowError
from wholebatch.loop import Loop, Member
from wholebatch.losses.loss import Loss, Terms, Units, loss_of
from wholebatch.make_ledger import make_ledger
from wholebatch.options import (
    BatchNormPolicy,
    Close,
    Memory,
    as_close,
    known_options,
    without_budget,
)
from wholebatch.run_loss import RunFunctions
from wholebatch.runner import Place
from wholebatch.warn_user import warn_user
from wholebatch.window.close import Handover
from wholebatch.window.close_options import ClipNorm
from wholebatch.window.ledger import PART_FAILED, Turn, refuse_no_grad
from wholebatch.window.model_and_optimizer import Scheduler
from wholebatch.window.observer import Plan
from wholebatch.window.saved_state import load_state, state_of
from wholebatch.window.steps import Steps, updates_per_epoch
from wholebatch.window.unclosed import UnclosedWarning
from wholebatch.window.units import UnitsCount
from wholebatch.window.window import MicroBatch, Step

_MicroBatch = TypeVar("_MicroBatch")


class Accumulator(Member):
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
    >>> acc.last_step.update, acc.last_step.micro_batches, acc.last_step.units
    (2, 2, 4.0)

    The last `backward` of a full window makes the update of the undivided batch and returns its
    Step; the others return None. `over` closes a short last window when the loader has ended: its
    Step is `acc.last_step`. Without `over`, every `steps`-th `backward` is the last, and `flush()`
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

    _closes_the_last: ClassVar[str] = "loop with over(loader)"
    """How the loop closes a short last window, for messages."""
    _knows_steps: ClassVar[bool] = True
    """True if the number of micro-batches of a window is known before its end."""
    _handover: ClassVar[Handover | None] = None
    """How a library that makes the step gets the gradients; None if the window steps."""

    @known_options(
        precision="your loop runs the forward: put it and the loss under "
        "torch.autocast(device, torch.bfloat16); WholeBatch has precision=",
        micro_batch="your loop splits the batch; WholeBatch has micro_batch=",
        loss="give backward() the loss of each micro-batch, or run() its function; WholeBatch "
        "has loss=",
        units="give it to backward(mean=loss, units=...); WholeBatch has units=",
    )
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
        schedule = Steps.of(steps)
        ledger = make_ledger(
            model,
            optimizer,
            clip_norm=clip_norm,
            scheduler=scheduler,
            memory=without_budget(memory),
            close=as_close(close),
            handover=self._handover,
        )
        self._ledger, self._steps = ledger, schedule
        models = ledger.target.models
        self._batchnorms = [choose_batchnorm(batchnorm, model) for model in models]
        for model in models:
            warn_of_spectral_norms(model)
        if audit:
            ledger.observer = OwnLoop(ledger.target)
            refuse_unreduced_steps(ledger)
            if self._handover is None:
                warn_of_empty_steps(self, ledger.target.optimizers)
        self.epoch = 0
        self.last_step: Step | None = None
        self._announced: UnitsCount | None = None  # of the windows, if they are announced
        # The micro-batches of the window; None to ask the schedule again.
        self._size: int | None = schedule.at(update=0, epoch=0)
        self._closes = False  # True if the micro-batch under way closes the window
        self._window_gone = False  # True if the item's window was flushed or discarded in it

        self._functions = RunFunctions(
            ledger,
            execute=check_execute(execute, ledger.target.device),
            audit=audit,
        )
        self.last_loss: Loss | Terms | None = None
        self._warning = UnclosedWarning(
            ledger, self._turn, owner=type(self).__name__, closes=self._closes_the_last
        )

    def __del__(self) -> None:
        warning = getattr(self, "_warning", None)
        if warning is not None:
            warning.warn()

    def __repr__(self) -> str:
        target = self._ledger.target
        models = "+".join(type(model).__name__ for model in target.models)
        optimizers = "+".join(type(optimizer).__name__ for optimizer in target.optimizers)
        steps, updates = self.steps, self.updates
        return f"Accumulator({models}, {optimizers or None}, steps={steps}, updates={updates})"

    # ------------------------------------------------------------- the window

    @property
    def steps(self) -> int:
        """Micro-batches of the window that is open, or of the next one."""
        return self._window_size

    @steps.setter
    def steps(self, steps: int | dict[int, int] | Steps | Callable[[int], int]) -> None:
        """Set the micro-batches of the next window."""
        self._steps = Steps.of(steps)
        self._forget_size()

    @property
    def micro_batches(self) -> int:
        """Micro-batches that the open window holds."""
        return self._ledger.held

    def updates_per_epoch(self, loader: Sized) -> int:
        """Return how many updates the next pass of `over(loader)` makes, as `steps=` is now.

        >>> import torch, wholebatch as wb
        >>> model = torch.nn.Linear(3, 1)
        >>> acc = wb.Accumulator(model, torch.optim.SGD(model.parameters()), steps=4)
        >>> acc.updates_per_epoch(range(10))
        3
        """
        return updates_per_epoch(loader, self._steps, update=self.updates, epoch=self.epoch)

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
            last: Outside of `over`, True if this micro-batch is the last of its window. False says
                that it is not: the window may then be longer than `steps`.

        Returns:
            The Step if the window was closed, else None.
        """
        with self._turn, self._part_of_micro_batch():
            refuse_no_grad("backward()", "compute the loss and call backward() outside of them")
            is_last = self._begin_backward(last) and not more
            ledger = self._ledger
            has_terms = isinstance(total, Terms) and ledger.known is not None
            loss = cast(Terms, total) if has_terms else loss_of(total, units, mean)
            ledger.add(loss, last=is_last, counts=self._counts)
            ledger.are_units_given = True
            return self._end_backward(more)

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
        refuse_no_grad(
            "run()", "call it outside of them; to evaluate, call the loss function itself"
        )
        with self._turn, self._part_of_micro_batch():
            self._ledger.before_window()
            self._ledger.sync.before_forwards()
            is_last = self._begin_backward(last)
            function = self._functions[loss]
            place = Place(
                position=len(self._ledger.micro_batches),
                in_parts=self._in_parts,
                steps=self._planned_steps,
                last=is_last and not more,
                counts=self._counts,
            )
            self.last_loss = function(micro, place)
            return self._end_backward(more)

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
        if self._ledger.has_losses:
            raise WindowError(
                "announce() in an open window: its units must be known before its first backward"
            )
        loop = self._loop
        if loop is not None and loop.has_several and self._ledger.sync.ranks > 1:
            raise WindowError(
                "announce() on several ranks, with several accumulators in one loop: a rank "
                "without data would not know which accumulator comes next; give each accumulator "
                "its own loop"
            )
        if not isinstance(units, Mapping) or not units:
            raise OptionError(f"announce({units!r}): must be the units by term, {{name: units}}")
        ledger = self._ledger
        self._announced = self._announced or UnitsCount(lambda counts: counts, ledger.sync.group)
        counts = self._announced([units])
        if ledger.open is not None:  # announced, and then an error: no loss has been added
            ledger.discard()
        ledger.begin(known=counts)

    def flush(self) -> Step | None:
        """Close a short last window and return its Step, or None if the window is empty."""
        with self._turn:
            ledger = self._ledger
            if ledger.micro is not None and ledger.micro.parts:
                ledger.end_micro_batch()
            step = self._close() if ledger.open is not None else None
            ledger.micro_batches.clear()
            self._leave_window()
            return step

    def discard(self) -> None:
        """Drop the open window; the next micro-batch begins a new one."""
        ledger, places = self._ledger, range(len(self._ledger.micro_batches))
        joins = self._loop is not None and ledger.sync.ranks > 1
        if joins:
            ledger.keep_seed()
        ledger.discard()
        self._leave_window()
        if self._loop is None:
            ledger.sync.restore()
        elif joins:  # the window of the other ranks goes on, and gets 0 from here
            ledger.micro_batches = [MicroBatch(place) for place in places]
            self._window_gone = False

    # --------------------------------------------------------------- the loop

    def over(
        self, loader: Iterable[_MicroBatch], *, continue_window: bool = False
    ) -> Iterator[_MicroBatch]:
        """Yield the loader's micro-batches, in windows of `steps`; the tail makes a short window.

        `continue_window=True` continues a window that an earlier loop left open.
        """
        return over(loader, self, continue_window=continue_window)

    def window(self, micro_batches: Iterable[_MicroBatch]) -> Iterator[_MicroBatch]:
        """Yield the micro-batches of one window, however many; the last backward closes it.

        For loops that learn at run time how many there are, as in reinforcement learning. `steps`
        and the epoch do not count here.

        >>> import torch, wholebatch as wb
        >>> model = torch.nn.Linear(3, 1)
        >>> acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
        >>> for rollout in (torch.randn(5, 3), torch.randn(8, 3)):
        ...     for micro in acc.window(rollout.split(2)):
        ...         step = acc.backward(model(micro).square().sum(), units=len(micro))
        ...     print(step.update, step.micro_batches, step.units)
        1 3 5.0
        2 4 8.0
        """
        micros = list(micro_batches)
        return Loop(micros, [self], size=len(micros)).items()

    # ----------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from; save it with those of the model and the optimizer.

        Call it between windows: inside `over`, after the backward that returned a Step.
        """
        feed = self._loop_state()
        return {**state_of(self._ledger, "Accumulator"), "epoch": self.epoch, "feed": feed}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from a `state_dict`; call it after the model and optimizer are loaded.

        Pass the next `over(loader)` the same data from its start: it continues at the saved
        position. The random generators are restored.
        """
        load_state(self._ledger, "Accumulator", saved)
        self.epoch = saved["epoch"]
        self._size = None
        self._load_loop_state(saved)

    # ---------------------------------------------------------- a micro-batch

    @property
    def _window_size(self) -> int:
        """The number of micro-batches of the window, or of the next one."""
        if self._size is None:
            self._size = self._steps.at(update=self._ledger.updates, epoch=self.epoch)
        return self._size

    def _set_size(self, size: int) -> None:
        self._size = size

    def _forget_size(self) -> None:
        """Ask again how large the next window is: its schedule or the epoch has changed."""
        if not self._ledger.micro_batches and self._ledger.micro is None:
            self._size = None

    @property
    def _leaves_gradients(self) -> bool:
        return self._handover is not None or not self._ledger.target.steps

    # ---------------------------------------------------------- a micro-batch

    def _begin_backward(self, last: bool | None) -> bool:
        """Begin a micro-batch, and a window with its first; return True if it is the last.

        A second backward for one micro-batch is refused.
        """
        ledger, loop, last = self._ledger, self._loop, self._last_of(last)
        if loop is not None and last is not None:
            raise WindowError(
                f"last={last} inside over(): over() already knows the window's last micro-batch. "
                "Leave last= out, or write the loop without over()"
            )
        if loop is not None and not self._may_use_item:
            raise WindowError(
                "a second backward for one micro-batch: pass more=True on all but its last"
            )
        if loop is not None:
            last = self._is_last_item
        is_new = ledger.micro is None
        done = ledger.begin_micro_batch().index + 1
        if last is False and loop is None:
            self._size = max(self._window_size, done + 1)
        self._closes = done >= self._window_size if last is None else last
        if is_new and done == 1:
            ledger.before_window(is_late=True)
            self._begin_window()
        ledger.refuse_broken()
        ledger.observer.backward_begins()
        return self._closes

    def _last_of(self, last: bool | None) -> bool | None:
        """Return True if a micro-batch is the last of its window, None if `steps` says it."""
        return last

    def _end_backward(self, more: bool) -> Step | None:
        """End a micro-batch after its backwards; the last one closes the window."""
        if more:
            self._ledger.observer.gradients_are_added(self._ledger.inputs)
            return None
        self._may_use_item = self._window_gone = False
        if self._counts:
            self._ledger.end_micro_batch()
        return self._close() if self._closes else None

    @property
    def _counts(self) -> bool:
        """False if the micro-batch only takes part in the collectives of the other ranks."""
        return self._loop is None or self._loop.counts

    @contextmanager
    def _part_of_micro_batch(self) -> Iterator[None]:
        """Leave the micro-batch as it was if a part of it fails.

        Without `over`, it is not known then whether the next backward belongs to it.
        """
        try:
            yield
        except BaseException:
            ledger = self._ledger
            if ledger.micro is not None and not ledger.micro.parts:
                ledger.micro = None
            elif ledger.micro is not None and self._loop is None:
                ledger.broken = ledger.broken or PART_FAILED
            raise

    @property
    def _in_parts(self) -> bool:
        """True if the micro-batch of this window is not the whole global batch."""
        is_whole = self._closes and not self._ledger.micro_batches
        return not is_whole or self._ledger.sync.ranks > 1

    @property
    def _planned_steps(self) -> tuple[int, ...]:
        """The number of micro-batches of the window; empty if it is not known before its end."""
        return (self._window_size,) if self._knows_steps else ()

    def _leave_window(self) -> None:
        """Note that a window was flushed or discarded; an item that is open outlives it."""
        self._size = None
        self._window_gone = self._may_use_item
        self._is_last_item = None

    def _close(self) -> Step:
        if self._loop is not None:
            self._loop.before_close(self)
        self._size = None
        self.last_step = self._ledger.close()
        self._after_close(self.last_step)
        return self.last_step

    def _after_close(self, step: Step) -> None:
        """Leave what a library needs for its own step."""

    # ---------------------------------------------------------- driven by a loop

    def _before_window(self) -> None:
        self._ledger.before_window()
        self._ledger.sync.before_forwards()
        for policy in self._batchnorms:
            policy.begin_window()

    def _begin_window(self) -> None:
        """Refuse what has changed since the last window, before its first micro-batch."""
        plan = Plan(self._ledger.number, self._in_parts, self._planned_steps)
        self._ledger.observer.window_begins(plan)
        for policy in self._batchnorms:
            policy.begin_window()

    def _end_item(self) -> None:
        """Count an item whose body made no backward, or not its last; close a full window."""
        ledger = self._ledger
        if ledger.broken is not None:
            ledger.micro = None
            return
        if self._counts and (ledger.micro is not None or not self._window_gone):
            ledger.end_micro_batch()
        self._window_gone = False
        done = len(ledger.micro_batches)
        is_last = self._is_last_item
        if done and (done >= self._window_size if is_last is None else is_last):
            self._end_unused()

    def _end_tail(self) -> None:
        ledger = self._ledger
        if ledger.broken is not None:
            warn_user(
                "the loop has ended in a window whose last backward failed, so the window made no "
                "update: call discard() where you catch the error"
            )
        elif ledger.micro_batches:
            self._end_unused()

    def _end_unused(self) -> None:
        """End a window whose last item made no backward."""
        ledger, size = self._ledger, len(self._ledger.micro_batches)
        if ledger.open is not None or ledger.sync.ranks > 1:
            self._join()
            return
        ledger.micro_batches.clear()
        self._size = None
        if ledger.options.zero_units == "raise":
            raise EmptyWindowError(
                f"none of the {size} micro-batches of this window was given to backward() or "
                "run() of the accumulator, so there is no gradient to update with: call "
                "acc.backward(mean=loss, units=...) in place of loss.backward(). If all "
                "micro-batches of a window may be left out, pass close=wb.Close(zero_units='skip')"
            )
        ledger.skipped += 1

    def _join(self, like: Any = None, most: int = 0) -> None:
        """Take part in a window of the other ranks, having nothing more to add."""
        if self._ledger.open is not None:
            self._close()
            return
        self._size = None
        known = None if self._announced is None else self._announced([])
        self.last_step = self._ledger.join(known)

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._forget_size()


def over(
    loader: Iterable[_MicroBatch], *accumulators: Accumulator, continue_window: bool = False
) -> Iterator[_MicroBatch]:
    """Loop over one loader with several accumulators, such as the two of a GAN.

    Args:
        loader: Any iterable of micro-batches.
        accumulators: The accumulators to drive.
        continue_window: Continue a window that is open, instead of refusing it.
    """
    return Loop(loader, accumulators, continue_window=continue_window).items()
