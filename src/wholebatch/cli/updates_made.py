"""What the updates of a run are, in words: those of the whole batch, or not, and why."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

_NOISY = 8
"""Samples below which the statistics of a BatchNorm are noisy."""


def samples_seen(samples: int, *, micro_batches: int, micro_batch: int | None) -> int:
    """Return the samples that a BatchNorm normalises by, if it sees each micro-batch alone."""
    return min(samples, micro_batch or -(-samples // max(1, micro_batches)))


def batchnorm_warning(seen: int) -> str:
    """Return a warning that BatchNorm changes the update, and what to do.

    >>> batchnorm_warning(32)
    '--batchnorm allow: BatchNorm sees 32 samples at a time, so the updates are not those of the \
whole batch'
    """
    text = (
        f"--batchnorm allow: BatchNorm sees {_samples(seen)} at a time, so the updates are not "
        "those of the whole batch"
    )
    if seen >= _NOISY:
        return text
    return (
        f"{text}, and fewer than {_NOISY} make its statistics noisy: use --batchnorm exact or "
        "freeze, or a larger --micro-batch"
    )


def not_whole(seen: Sequence[int]) -> str:
    """Return that updates are not those of the whole batch; `seen` has a number for each window.

    >>> not_whole([4, 4, 1])
    'not those of the whole batch: BatchNorm saw 4 samples at a time'
    """
    usual = median_low(seen)
    return f"not those of the whole batch: BatchNorm saw {_samples(usual)} at a time"


def whole(*, recipe: str, is_frozen: bool, is_split: bool, is_tested: bool) -> str:
    """Return how the updates of a run are those of the whole batch.

    >>> whole(recipe="mine.py", is_frozen=False, is_split=True, is_tested=True)
    'those of the whole batch; prove it: wholebatch verify mine.py'
    """
    frozen = ", with BatchNorm frozen" if is_frozen else ""
    if not is_split:
        return f"those of the whole batch, which was not split{frozen}"
    if not is_tested:
        return (
            f"those of the whole batch{frozen}, if its loss adds up, which was not tested "
            f"(audit = False): wholebatch verify {recipe}"
        )
    return f"those of the whole batch{frozen}; prove it: wholebatch verify {recipe}"


def _samples(number: int) -> str:
    return f"{number} sample{'' if number == 1 else 's'}"
