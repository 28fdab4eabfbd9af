"""The device's own clock: the time of windows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

__all__ = ["mark", "milliseconds"]


def mark() -> Any:
    """Note the time at which the device has done all its work so far; nothing waits for it."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(marks: Sequence[Any]) -> list[float]:
    """Return the time from each mark to the next."""
    if not torch.cuda.is_available():
        return [1000 * (after - before) for before, after in pairwise(marks)]
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]
