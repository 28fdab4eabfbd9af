"""The windows of a `WholeBatch` on several ranks: they meet, and a rank without data joins."""

from __future__ import annotations

from typing import Any, ClassVar

from wholebatch.batch.lookahead_loader import NOTHING
from wholebatch.errors import RankError
from wholebatch.loop import Member
from wholebatch.memory.micro_batch_fitting import Fitting
from wholebatch.runner import Runner, WindowRun
from wholebatch.window.autocast import Precision
from wholebatch.window.ledger import Turn
from wholebatch.window.units import UnitsCount
from wholebatch.window.window import Step


class Observer:
    """Sees the windows of a `WholeBatch`, on all ranks or on none. By default it does nothing."""

    def begin(self) -> None:
        """See a window begin, or begin again."""

    def defers_reduction(self, micro_batches: int) -> bool:
        """Return True to see the gradients of a window before they are reduced over the ranks."""
        return False

    def micro_batch_done(self, done: int) -> None:
        """See the gradients after so many micro-batches."""

    def closed(self, step: Step, *, joined: bool) -> None:
        """See the report; a rank that only `joined` had no micro-batch."""


class BatchWindows(Member):
    """The windows of a `WholeBatch`, each of one batch, as a `Loop` drives them."""

    last_step: Step | None
    _turn: Turn
    _count: UnitsCount | None
    _precision: Precision
    _runner: Runner
    _fitting: Fitting
    observers: list[Observer]
    _runs_forwards: ClassVar[bool] = True
    """True if it runs the forwards of a loop's item itself."""

    def _meet(self, items: int) -> tuple[int, int]:
        """Meet ranks that have a batch, if this one has none; with a batch, `step` meets them."""
        return (items, items) if items else (self._meet_with(0), 0)

    def _join(self, like: Any, most: int) -> None:
        """Take part in an update of the other ranks, without a batch."""
        with self._turn:
            self.last_step = self._joined(like, most)

    def _meet_with(self, micro_batches: int, steps: bool = True) -> int:
        """Meet the other ranks before a window; return the most micro-batches that a rank brings.

        Refuse to go on where a rank has none and every rank is needed.
        """
        most, fewest = self._ledger.sync.group.most_and_fewest(micro_batches)
        why = self._needs_every_rank(steps) if most > 0 and fewest == 0 else None
        if why is not None:
            raise RankError(
                f"a rank has no batch for this update, and {why}: give every rank equally many "
                "batches, with at least one sample each"
            )
        return most

    def _needs_every_rank(self, steps: bool) -> str | None:
        """Return the reason why every rank needs data, or None."""
        if not steps or self._ledger.leaves_gradients:
            return "after gradient() the step is made by each rank's own loop"
        return self._runner.needs_every_rank()

    def _begin_again(self) -> None:
        """Drop an attempt that ran out of memory; all ranks keep the seed they have agreed on."""
        ledger = self._ledger
        ledger.keep_seed()
        ledger.discard()
        self._runner.executor.let_go()

    def _joined(self, like: Any, forwards: int | None) -> Step:
        ledger = self._ledger
        why = self._needs_every_rank(steps=True)
        if why is not None:
            raise RankError(
                f"rank {ledger.sync.rank} has no sample of this batch, and {why}: make the batch "
                "larger"
            )
        ledger.before_window()
        ledger.sync.before_forwards()
        try:
            return self._join_with(like, forwards)
        finally:
            ledger.sync.restore()

    def _join_with(self, like: Any, forwards: int | None) -> Step:
        """Take part in every collective of the other ranks' window, in their order."""
        ledger = self._ledger
        for observer in self.observers:
            observer.begin()
        self._fitting.join()
        self._runner.join_test()
        if self._count is not None and like is not NOTHING:
            self._count.learn(like)
        known = None if self._count is None else self._count([])
        self._runner.begin_window()
        if ledger.sync.counts_must_agree:
            step = self._joined_forwards(like, known, forwards)
        else:
            self._fitting.agree()
            step = ledger.join(known)
        for observer in self.observers:
            observer.closed(step, joined=True)
        return step

    def _joined_forwards(
        self, like: Any, known: dict[str, float] | None, forwards: int | None
    ) -> Step:
        """Run as many forwards as the other ranks, none of which counts."""
        ledger = self._ledger
        if like is NOTHING:
            raise RankError(
                f"rank {ledger.sync.rank} has no data at all, and a sharded model needs every rank "
                "in every forward: give it at least one batch"
            )
        stand_in = self._fitting.split(like)[0]
        ledger.begin(0, known=known)
        with self._precision.window():
            self._runner.run((), WindowRun(forwards=forwards, stand_in=stand_in))
        return ledger.close()
