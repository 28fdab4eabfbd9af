"""The windows of a loop over micro-batches: how a micro-batch begins, ends, and closes a window.

`Accumulator` is what the user calls; a `Loop` drives these windows where there is one.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import proxy

from wholebatch.audit.layers import warn_of_spectral_norms
from wholebatch.audit.loop_checks import LoopChecks
from wholebatch.coupled import choose as choose_batchnorm
from wholebatch.errors import EmptyWindowError, WindowError
from wholebatch.loop import Progress, State
from wholebatch.warn_user import warn_user
from wholebatch.window.close import Handover
from wholebatch.window.foreign_writes import Untouched
from wholebatch.window.ledger import HasLedger, Ledger
from wholebatch.window.steps import Steps
from wholebatch.window.units import UnitsCount
from wholebatch.window.window import Step


class LoopWindows(HasLedger):
    """The windows of an `Accumulator`.

    Args:
        ledger: What makes the windows.
        steps: Micro-batches per window.
        batchnorm: What to do with BatchNorm layers.
        audit: Test the first window, and units of means in windows 2, 4, 8, ...
    """

    _written_by: ClassVar[str] = "the loop"
    """Who must not write to an open window, for messages."""
    _closes_the_last: ClassVar[str] = "loop with over(loader)"
    """How the loop closes a short last window, for messages."""
    _knows_steps: ClassVar[bool] = True
    """True if the number of micro-batches of a window is known before its end."""
    _handover: ClassVar[Handover | None] = None
    """How a library that makes the step gets the gradients; None if the window steps."""
    _runs_forwards: ClassVar[bool] = False
    """True if a loop's item is used without the user's own forward."""

    def __init__(self, ledger: Ledger, *, steps: Steps, batchnorm: str, audit: bool) -> None:
        models = ledger.target.models
        self._ledger = ledger
        self._steps = steps
        self._untouched = Untouched(ledger, self._written_by)
        self._batchnorms = [choose_batchnorm(batchnorm, model) for model in models]
        for model in models:
            warn_of_spectral_norms(model)
        self._checks = LoopChecks(models, audit=audit)
        self.epoch = 0
        self.last_step: Step | None = None
        self._announced: UnitsCount | None = None  # of the windows, if they are announced
        self._has_warned_of_length = False
        this = proxy(self)  # no cycle: a deleted accumulator is gone at once, and so are its hooks
        self._progress = Progress(lambda: this._next_size())
        self._watch()

    def _next_size(self) -> int:
        return self._steps.at(update=self._ledger.updates, epoch=self.epoch)

    # ---------------------------------------------------------- a micro-batch

    def _begin_backward(self, last: bool | None) -> bool:
        """Begin a micro-batch, and a window with its first; return True if it is the last.

        A second backward for one micro-batch is refused.
        """
        last = self._last_of(last)
        progress, loop = self._progress, self._progress.loop
        if loop is None:
            is_own_loop = self._handover is None
            if last is False and is_own_loop and progress.items + 1 >= progress.size:
                self._warn_of_length(progress.size)
            if progress.begin_item(last=last):
                self._begin_window()
        elif last is not None:
            raise WindowError(
                f"last={last} inside over(): over() already knows the window's last micro-batch. "
                "Leave last= out, or write the loop without over()"
            )
        elif progress.state is State.WINDOW_GONE:
            loop.begin_item(self, counts=progress.counts)
        elif not progress.is_item_open:
            raise WindowError(
                "a second backward for one micro-batch: pass more=True on all but its last"
            )
        self._ledger.added.refuse_broken()
        self._untouched.check()
        return progress.is_last

    def _warn_of_length(self, steps: int) -> None:
        """Warn, once, that `last=False` makes a window longer than `steps`."""
        if not self._has_warned_of_length:
            self._has_warned_of_length = True
            warn_user(
                f"last=False for micro-batch {steps} of a window of steps={steps}: the window goes "
                "on until last=True. Where steps= closes the windows, leave last= out and call "
                "acc.flush() after the loop, or loop with acc.over(loader); where last= closes "
                "them, give the largest number of micro-batches as steps="
            )

    def _last_of(self, last: bool | None) -> bool | None:
        """Return True if a micro-batch is the last of its window, None if `steps` says it."""
        return last

    def _end_backward(self, more: bool) -> Step | None:
        """Count a micro-batch after its backwards; the last one closes the window."""
        self._untouched.remember()
        if more:
            self._ledger.added.more_of_micro_batch = True
            self._progress.expect_more()
            return None
        if self._checks.are_asked:
            self._checks.end_micro_batch()
        if self._progress.counts:
            self._ledger.end_micro_batch()
        return self._close() if self._progress.end_item() else None

    @property
    def _in_parts(self) -> bool:
        """True if a micro-batch of this window, or of the next, is not the whole global batch."""
        return not self._progress.is_whole or self._ledger.sync.ranks > 1

    @property
    def _planned_steps(self) -> tuple[int, ...]:
        """The number of micro-batches of the window; empty if it is not known before its end."""
        return (self._progress.size,) if self._knows_steps else ()

    def _watch(self) -> None:
        """Check the forwards of a first window in parts; none with collectives is repeated."""
        sync = self._ledger.sync
        if self._checks.active and self._in_parts:
            self._checks.watch(calls=sync.runs_alone)

    def _close(self) -> Step:
        self._untouched.check(rates=True)
        progress, loop = self._progress, self._progress.loop
        if self._in_parts:
            self._checks.end_window(self._ledger.added.micro_batches)
        if loop is not None:
            loop.before_close(self)
        progress.end_window()
        self._untouched.forget()
        self.last_step = self._ledger.close()
        self._after_close(self.last_step)
        self._watch()
        return self.last_step

    def _after_close(self, step: Step) -> None:
        """Leave what a library needs for its own step."""

    # ---------------------------------------------------------- driven by a loop

    def _begin_window(self) -> None:
        """Refuse what has changed since the last window, before its first micro-batch."""
        if self._progress.loop is not None:
            self._ledger.sync.before_forwards()
        self._checks.begin_window(self._ledger.number)
        self._watch()
        for policy in self._batchnorms:
            policy.begin_window()

    def _end_unused(self) -> None:
        """End a window whose last micro-batch made no backward."""
        size = self._progress.size
        if self._ledger.open is not None or self._ledger.sync.ranks > 1:
            self._join()
            return
        self._progress.end_window()
        if self._ledger.options.zero_units == "raise":
            raise EmptyWindowError(
                f"none of the {size} micro-batches of this window was given to backward() or "
                "run() of the accumulator, so there is no gradient to update with: call "
                "acc.backward(mean=loss, units=...) in place of loss.backward(). If all "
                "micro-batches of a window may be left out, pass close=wb.Close(zero_units='skip')"
            )
        self._ledger.skipped += 1

    def _join(self, like: Any = None, most: int = 0) -> None:
        """Take part in a window of the other ranks, having nothing more to add."""
        if self._ledger.open is not None:
            self._close()
            return
        self._progress.end_window()
        known = None if self._announced is None else self._announced([])
        self.last_step = self._ledger.join(known)

    def _meet(self, items: int) -> tuple[int, int]:
        return self._ledger.sync.group.most_and_fewest(items)

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._progress.forget_size()
