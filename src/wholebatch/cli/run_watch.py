"""Warnings about a run that goes wrong, most of them given once."""

from __future__ import annotations

import math
from collections import Counter, deque
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
    """Counts in how many windows in a row something was seen, and says it once."""

    best: float = math.inf
    last: float = math.nan
    spikes: int = 0
    """Windows with a loss far above the running median."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_RUNNING))
    in_a_row: Counter[str] = field(default_factory=Counter)
    loading: float = 0.0
    seconds: float = 0.0

    def notes(self, step: Step, *, loading: float, seconds: float) -> Iterator[str]:
        """Yield what the windows so far show; `loading` is the time of reading this batch."""
        if step.skipped is None and math.isfinite(step.loss):
            yield from self._spike(step)
            self.best, self.last = min(self.best, step.loss), step.loss
            self.losses.append(step.loss)
        if self.in_a_row["windows"]:  # the first one builds and compiles
            self.loading, self.seconds = self.loading + loading, self.seconds + seconds
        share = self.loading / self.seconds if self.seconds else 0.0
        states = {
            "windows": True,
            "high": step.loss > _DIVERGED * self.best > 0,
            "zero": step.grad_norm == 0,
            "clipped": step.clip < 1,
            "waits": share > 1 / 3,
        }
        texts = {
            "high": f"the loss has been more than ten times its best, {self.best:.4g}, for "
            f"{_ENOUGH} updates: try a lower rate, a longer warm-up or --clip-norm",
            "zero": f"the gradient has been 0 in {_ENOUGH} windows: nothing is learned; look for "
            "detached tensors and frozen parameters",
            "clipped": f"the gradient was clipped in each of {_ENOUGH} windows: --clip-norm sets "
            "the length of every update; a larger one may be meant",
            "waits": f"reading the data takes {share:.0%} of the time: workers in the recipe's "
            "defaults read ahead",
        }
        for name, is_seen in states.items():
            self.in_a_row[name] = self.in_a_row[name] + 1 if is_seen else 0
            if self.in_a_row[name] == _ENOUGH and name in texts:
                yield texts.pop(name)
                self.in_a_row[name] = -(10**12)  # once

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
