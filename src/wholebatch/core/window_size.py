"""The number of micro-batches in a window: fixed, or a schedule by update or by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

from wholebatch.errors import OptionError

__all__ = ["Steps", "by_epoch"]


@dataclass(frozen=True)
class Steps:
    """`changes[k]` steps from update (or epoch) k on, until the next key.

    >>> Steps.of({0: 4, 800: 8}).at(update=799, epoch=0)
    4
    >>> Steps.of(by_epoch({0: 4, 8: 8})).at(update=5000, epoch=8)
    8
    """

    changes: tuple[tuple[int, int], ...]
    per_epoch: bool = False

    @staticmethod
    def of(steps: object) -> Steps:
        """Read what a user passes: a number, a mapping by update, or `by_epoch(...)`."""
        if isinstance(steps, Steps):
            return steps
        if isinstance(steps, Mapping):
            return _schedule(steps, per_epoch=False)
        if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
            raise OptionError(
                f"steps={steps!r}: must be a positive number of micro-batches, a schedule by "
                "update such as {0: 4, 800: 8}, or wb.by_epoch({0: 4, 8: 8})"
            )
        return Steps(((0, int(steps)),))

    def at(self, *, update: int, epoch: int) -> int:
        """Return the steps of the window that begins after `update` updates, in `epoch`."""
        now = epoch if self.per_epoch else update
        return next(steps for start, steps in reversed(self.changes) if start <= now)


def by_epoch(schedule: Mapping[int, int]) -> Steps:
    """Return a schedule of `steps=` by epoch: one pass of `over` over its loader is one."""
    return _schedule(schedule, per_epoch=True)


def _schedule(schedule: Mapping[int, int], *, per_epoch: bool) -> Steps:
    what = "epoch" if per_epoch else "update"
    if 0 not in schedule:
        raise OptionError(f"steps={dict(schedule)!r}: must say how many from {what} 0 on")
    for start, steps in schedule.items():
        for number, least in ((start, 0), (steps, 1)):
            if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
                raise OptionError(
                    f"steps={dict(schedule)!r}: {start!r}: {steps!r} must be an {what} (0 or "
                    "more) and a positive number of micro-batches"
                )
    changes = sorted((int(start), int(steps)) for start, steps in schedule.items())
    return Steps(tuple(changes), per_epoch)
