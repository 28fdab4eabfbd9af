"""How many micro-batches a window has: a number, a schedule by update or epoch, or a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import TypeGuard

from wholebatch.errors import OptionError


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


def updates_per_epoch(
    loader: Sized,
    steps: int | dict[int, int] | Steps | Callable[[int], int],
    *,
    update: int = 0,
    epoch: int = 0,
) -> int:
    """Return how many updates one pass over a loader makes, a short last window included.

    It is `math.ceil(len(loader) / steps)`, or follows the schedule in `steps`. Use it to give a
    learning-rate scheduler its number of updates, before there is an Accumulator.

    >>> updates_per_epoch(range(10), 4), updates_per_epoch(range(10), {0: 1, 2: 4})
    (3, 4)

    Args:
        loader: What `over` will loop over. It must have a length, in micro-batches.
        steps: As for `Accumulator`.
        update: The updates made before this pass.
        epoch: The passes made before this one.
    """
    try:
        micro_batches, updates = len(loader), 0
    except TypeError as error:
        raise OptionError(
            f"updates_per_epoch(loader): {error}. Give the schedule a number of updates, and count "
            "them by step.update"
        ) from error
    while micro_batches > 0:
        micro_batches -= Steps.of(steps).at(update=update + updates, epoch=epoch)
        updates += 1
    return updates


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
