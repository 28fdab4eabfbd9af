"""Windows of several settings in turn, every round on one batch.

What else a machine does comes and goes, and takes half of it or more while it is there. Measured
one after the other, a setting that meets with it looks slow. In turn it comes over all of them
alike, and the ratios of a round's windows say what the settings themselves do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wholebatch.step import Step
from wholebatch.tune.measure import Subject

__all__ = ["Ratio", "Turns", "ratio_of"]


class Makes(Protocol):
    """Who makes a window of a batch: seconds with those that fetching took, the slowest rank's."""

    def window_of(self, batch: object, fetched: float) -> tuple[float, Step]: ...


@dataclass(frozen=True)
class Ratio:
    """How fast one is beside another: the median of the rounds, and its 95% interval."""

    median: float
    low: float
    high: float


def ratio_of(values: Sequence[float]) -> Ratio:
    """The median with the interval that the order of the values gives, whatever their noise is.

    The number of values above the true median is that of heads in as many throws of a coin. Five
    and fewer do not suffice for 95%: then it is from the least to the greatest.

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
    """Rounds of windows, one of each setting, forwards and backwards by turns."""

    subject: Subject
    made: Sequence[Makes]
    rounds: list[list[float]] = field(default_factory=list)
    units: list[float] = field(default_factory=list)

    def round(self) -> None:
        """One more window of each, of the same batch; fetching it is part of each one's time."""
        batch, fetched = self.subject.fetch()
        seconds = [0.0] * len(self.made)
        order = range(len(self.made))
        for at in order if len(self.rounds) % 2 else reversed(order):
            seconds[at], step = self.made[at].window_of(batch, fetched)
        self.rounds.append(seconds)
        self.units.append(step.units)

    def spent(self, at: int) -> float:
        """Seconds in all of one."""
        return sum(seconds[at] for seconds in self.rounds)

    def ratio(self, at: int, to: int) -> Ratio:
        """How fast one is beside another."""
        return ratio_of([seconds[to] / seconds[at] for seconds in self.rounds])
