"""Warnings about a run that goes wrong, most of them given once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from wholebatch.window.window import Step

_ENOUGH = 20
"""So many windows in a row must show it."""

_SPIKE = 4.0
"""A loss so many times the running median is a spike."""
_RUNNING, _LEAST, _MOST_TOLD = 25, 4, 3
"""Windows of the running median, the fewest of them, and the spikes that are told one by one."""
_DIVERGED = 10.0
"""A loss so many times the best one has diverged."""


@dataclass(eq=False)
class RunWatch:
    """Watches the losses of a run."""

    best: float = math.inf
    last: float = math.nan
    spikes: int = 0
    """Windows with a loss far above the running median."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_RUNNING))
    high_in_a_row: int = 0

    def notes(self, step: Step) -> Iterator[str]:
        """Yield what the windows so far show."""
        if step.skipped is None and math.isfinite(step.loss):
            yield from self._spike(step)
            self.best, self.last = min(self.best, step.loss), step.loss
            self.losses.append(step.loss)
        is_high = step.loss > _DIVERGED * self.best > 0
        self.high_in_a_row = self.high_in_a_row + 1 if is_high else 0
        if self.high_in_a_row == _ENOUGH:
            yield (
                f"the loss has been more than ten times its best, {self.best:.4g}, for {_ENOUGH} "
                "updates: try a lower rate, a longer warm-up or --clip-norm"
            )

    def _spike(self, step: Step) -> Iterator[str]:
        """Yield that this loss is far above the running median; the first few are told."""
        if len(self.losses) < _LEAST or not step.loss > _SPIKE * median(self.losses) > 0:
            return
        self.spikes += 1
        if self.spikes <= _MOST_TOLD:
            yield (
                f"update {step.update}: the loss jumped to {step.loss:.4g}, "
                f"{step.loss / median(self.losses):.3g} times the running median: look at this "
                "batch, or try a lower rate or --clip-norm"
            )

    @property
    def ending(self) -> str | None:
        """Return how the losses ended, where that is not well."""
        if self.last > _DIVERGED * self.best > 0:
            return (
                f"diverged: the last loss, {self.last:.4g}, is {self.last / self.best:.3g} times "
                f"the best, {self.best:.4g}: try a lower rate, a longer warm-up or --clip-norm"
            )
        if self.spikes > _MOST_TOLD:
            return f"the loss was above {_SPIKE:g} times its running median {self.spikes} times"
        return None
