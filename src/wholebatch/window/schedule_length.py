"""Tell schedules that were made for fewer updates than a loop makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_LENGTHS = ("total_steps", "T_max", "total_iters")
"""Where torch's schedulers keep the number of their steps."""


def short_schedule(
    schedulers: Sequence[Any], micro_batches: int, steps: int, updates: int
) -> str | None:
    """Return a warning of a schedule over `micro_batches // steps` updates per epoch, or None.

    A loop makes one more if the last window is short. OneCycleLR raises an error at the end then,
    and a cosine rises again.
    """
    whole = micro_batches // steps
    if whole < 2 or updates != whole + 1:  # every length is a multiple of 1
        return None
    for scheduler in schedulers:
        for name in _LENGTHS:
            length = getattr(scheduler, name, None)
            if isinstance(length, int) and length % whole == 0 and length % updates:
                begin = f"{type(scheduler).__name__} was made for {length} updates"
                return (
                    f"{begin}, a multiple of len(loader) // steps = {whole}, but each epoch of "
                    f"this loop makes {updates}: its last window is short. Give it "
                    "acc.updates_per_epoch(loader) × epochs; if that is meant, "
                    f'warnings.filterwarnings("ignore", "{begin}") silences this warning'
                )
    return None
