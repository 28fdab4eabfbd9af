"""Windows of several settings in turn, with one batch per round.

Other work on a machine comes and goes, and can take half of it or more. Measured one after the
other, the setting that runs at that time looks slow. In turn, it affects all settings alike, and
the ratios within a round compare the settings themselves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wholebatch.core.window import Step
from wholebatch.tune.setting_run import Subject

__all__ = ["Ratio", "Turns", "ratio_of"]


class Makes(Protocol):
    """Runs a window of a batch; the seconds include fetching and are the slowest rank's."""

    def window_of(self, batch: object, fetched: float) -> tuple[float, Step]: ...


@dataclass(frozen=True)
class Ratio:
    """The relative speed of two settings: the median of the rounds, and its 95% interval."""

    median: float
    low: float
    high: float


def ratio_of(values: Sequence[float]) -> Ratio:
    """Return the median with its distribution-free 95% interval.

    The number of values above the true median follows a binomial distribution, like coin tosses.
    Five values or fewer do not suffice for 95%: the interval then runs from the least to the
    greatest.

    >>> ratio_of([0.9, 1.0, 1.1])
    Ratio(median=1.0, low=0.9, high=1.1)
    >>> ratio_of([float(value) for value in range(1, 21)])
    Ratio(median=10.5, low=6.0, high=15.0)
    """
    ordered, number = sorted(values), len(values)
    beyond, out = 0.0, 0
    while out < number // 2 and (beyond := beyond + math.comb(number, out) / 2**number) <= 0.025:
        out += 1
    inner = max(0, out - 1)
    return Ratio(statistics.median(ordered), ordered[inner], ordered[number - 1 - inner])


@dataclass
class Turns:
    """Rounds of windows, one of each setting, in alternating order."""

    subject: Subject
    made: Sequence[Makes]
    rounds: list[list[float]] = field(default_factory=list)
    units: list[float] = field(default_factory=list)

    def round(self) -> None:
        """Run one more window of each on the same batch; each one's time includes fetching it."""
        batch, fetched = self.subject.fetch()
        seconds = [0.0] * len(self.made)
        order = range(len(self.made))
        for at in order if len(self.rounds) % 2 else reversed(order):
            seconds[at], step = self.made[at].window_of(batch, fetched)
        self.rounds.append(seconds)
        self.units.append(step.units)

    def spent(self, at: int) -> float:
        """Return the total seconds of one setting."""
        return sum(seconds[at] for seconds in self.rounds)

    def ratio(self, at: int, to: int) -> Ratio:
        """Return the speed of one setting relative to another."""
        return ratio_of([seconds[to] / seconds[at] for seconds in self.rounds])
