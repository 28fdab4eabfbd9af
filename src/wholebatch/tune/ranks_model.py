"""A model of the time on more ranks. Only one window is measured.

Every rank runs the tuned window on its own data. Gradients are reduced once per window by a ring
all-reduce, which sends `2 (n − 1) / n` of their bytes over each rank's link, in `2 (n − 1)`
messages. The reduction overlaps with the last micro-batch's backward, or not at all: the truth lies
between.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wholebatch.errors import OptionError
from wholebatch.memory.budget import bytes_said

__all__ = ["RanksModel", "parse_bandwidth"]

_UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "kbit": 125.0, "Mbit": 125e3, "Gbit": 125e6}
_BANDWIDTH = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMG]?(?:B|bit))(?:/s)?\s*")


def parse_bandwidth(text: str) -> float:
    """Parse the bandwidth of a link into bytes per second.

    >>> parse_bandwidth("25GB/s"), parse_bandwidth("100 Gbit/s")
    (25000000000.0, 12500000000.0)
    """
    match = _BANDWIDTH.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise OptionError(
            f'bandwidth {text!r}: must be a rate of one rank\'s link such as "25GB/s" or '
            '"100Gbit/s"'
        )
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class RanksModel:
    """The seconds of a window over ranks, from one rank's window and the bandwidth of a link."""

    window: float
    last_backward: float
    units: float
    bytes_reduced: int
    bandwidth: float
    measured: bool
    latency: float = 20e-6

    def reduction(self, ranks: int) -> float:
        """Return the seconds of the reduction alone."""
        if ranks == 1:
            return 0.0
        return (
            2 * (ranks - 1) / ranks * self.bytes_reduced / self.bandwidth
            + 2 * (ranks - 1) * self.latency
        )

    def point(self, ranks: int) -> dict[str, float]:
        """Return the window on this many ranks, without any overlap and with full overlap."""
        reduction = self.reduction(ranks)
        slowest = self.window + reduction
        fastest = self.window + max(0.0, reduction - self.last_backward)
        return {
            "ranks": ranks,
            "seconds": slowest,
            "seconds_overlapped": fastest,
            "units_per_second": ranks * self.units / slowest,
            "units_per_second_overlapped": ranks * self.units / fastest,
            "communication_share": reduction / slowest,
        }

    def steps_until(self, share: float, ranks: int, *, micro_step: float) -> int:
        """Return the micro-batches per window that keep the reduction at or below this share."""
        needed = self.reduction(ranks) * (1 - share) / share
        return max(1, -int(-(needed / micro_step) // 1)) if micro_step else 1

    def to_dict(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Return the model at these numbers of ranks, marked as a model."""
        how = "measured here" if self.measured else "as given"
        return {
            "is_model": True,
            "said": (
                f"A model: {bytes_said(self.bytes_reduced)} of gradients reduced once per window "
                f"by a ring over links of {self.bandwidth / 1e9:.3g} GB/s ({how}); every rank "
                "makes the tuned window. No such cluster was measured."
            ),
            "bytes_reduced": self.bytes_reduced,
            "bandwidth": self.bandwidth,
            "bandwidth_measured": self.measured,
            "latency": self.latency,
            "points": [self.point(n) for n in sorted({1, *ranks})],
        }
