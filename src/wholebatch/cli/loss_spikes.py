"""Losses far above those before them: a spike often comes before a run diverges."""

from __future__ import annotations

import math
from statistics import median

_REMEMBERED = 50
_NEEDED = 16
_DEVIATIONS = 6.0


class LossSpikes:
    """Compares every loss with the median of the 50 before it.

    A spike is more than six standard deviations above it. The deviation is taken from the median
    distance, which earlier spikes do not move.

    >>> spikes = LossSpikes()
    >>> found = [spikes.see(2.0 + 0.01 * (update % 5)) for update in range(20)]
    >>> any(found), spikes.see(4.0)
    (False, 'loss 4 is far above the last 20 (median 2.02)')
    """

    def __init__(self) -> None:
        self.recent: list[float] = []
        self.count = 0

    def see(self, loss: float) -> str | None:
        """Return a sentence if this loss is a spike."""
        if not math.isfinite(loss):
            return None
        before, self.recent = self.recent, [*self.recent, loss][-_REMEMBERED:]
        if len(before) < _NEEDED:
            return None
        middle = median(before)
        deviation = 1.4826 * median(abs(one - middle) for one in before)
        if loss - middle <= _DEVIATIONS * deviation + 1e-6 * abs(middle):
            return None
        self.count += 1
        return f"loss {loss:.4g} is far above the last {len(before)} (median {middle:.4g})"
