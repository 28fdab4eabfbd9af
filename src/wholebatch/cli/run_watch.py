"""Warnings about a run that goes wrong, each given once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from wholebatch.window.window import Step

_ENOUGH = 20
"""So many windows in a row must show it."""


@dataclass(eq=False)
class RunWatch:
    """Counts in how many windows in a row something was seen, and says it once."""

    best: float = math.inf
    in_a_row: Counter[str] = field(default_factory=Counter)
    loading: float = 0.0
    seconds: float = 0.0

    def notes(self, step: Step, *, loading: float, seconds: float) -> Iterator[str]:
        """Yield what the windows so far show; `loading` is the time of reading this batch."""
        if step.skipped is None and math.isfinite(step.loss):
            self.best = min(self.best, step.loss)
        if self.in_a_row["windows"]:  # the first one builds and compiles
            self.loading, self.seconds = self.loading + loading, self.seconds + seconds
        share = self.loading / self.seconds if self.seconds else 0.0
        states = {
            "windows": True,
            "high": step.loss > 10 * self.best > 0,
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
            "waits": f"reading the data takes {share:.0%} of the time: --workers reads ahead",
        }
        for name, is_seen in states.items():
            self.in_a_row[name] = self.in_a_row[name] + 1 if is_seen else 0
            if self.in_a_row[name] == _ENOUGH and name in texts:
                yield texts.pop(name)
                self.in_a_row[name] = -(10**12)  # once
