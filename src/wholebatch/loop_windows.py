"""The windows of a loop over micro-batches: how a micro-batch begins, ends, and closes a window.

`Accumulator` is what the user calls; a `Loop` drives these windows where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from wholebatch.audit.foreign_writes import refuse_unreduced_steps, warn_of_empty_steps
from wholebatch.audit.layers import warn_of_spectral_norms
from wholebatch.audit.own_loop import OwnLoop
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.errors import EmptyWindowError, WindowError
from wholebatch.loop import Member
from wholebatch.warn_user import warn_user
from wholebatch.window.close import Handover
from wholebatch.window.ledger import PART_FAILED, Ledger
from wholebatch.window.observer import Plan
from wholebatch.window.steps import Steps
from wholebatch.window.units import UnitsCount
from wholebatch.window.window import Step


class LoopWindows(Member):
    """The windows of an `Accumulator`.

    Args:
        ledger: What makes the windows.
        steps: Micro-batches per window.
        batchnorm: What to do with BatchNorm layers.
        audit: Test the first window, and units of means in windows 2, 4, 8, ...
    """

    _closes_the_last: ClassVar[str] = "loop with over(loader)"
    """How the loop closes a short last window, for messages."""
    _knows_steps: ClassVar[bool] = True
    """True if the number of micro-batches of a window is known before its end."""
    _handover: ClassVar[Handover | None] = None
    """How a library that makes the step gets the gradients; None if the window steps."""

    def __init__(self, ledger: Ledger, *, steps: Steps, batchnorm: str, audit: bool) -> None:
        models = ledger.target.models
        self._ledger = ledger
        self._steps = steps
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
        self._size: int | None = steps.at(update=0, epoch=0)  # of the window; None to ask again
        self._closes = False  # True if the micro-batch under way closes the window
        self._window_gone = False  # True if the item's window was flushed or discarded in it

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
