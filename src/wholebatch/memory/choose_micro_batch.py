"""The largest micro-batch that fits a budget.

On CUDA `micro_batch="auto"` measures real steps of 1, 2, 4, … samples; a plan predicts them. The
peak over the size is the largest of several straight lines (a small micro-batch is bound by the
gradients, a larger one by activations), so it is convex, and the line through the last two sizes
tells where it passes the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch.samples import Static, layout_of, take
from wholebatch.errors import OptionError
from wholebatch.readable_sizes import bytes_said

_CLOSE_ENOUGH = 16
"""A size is good enough if one that is larger by a sixteenth does not fit."""


@dataclass(frozen=True)
class Choice:
    """The micro-batch that was chosen for a budget."""

    micro_batch: int
    budget: int
    measured: dict[int, int] = field(default_factory=dict)
    """The peak bytes of a step by the samples of its micro-batches."""
    failed: tuple[int, ...] = ()
    """The sizes that did not fit."""
    is_whole_batch: bool = False

    def summary(self) -> str:
        """Return the choice and its reason in two lines."""
        above = min((size for size in self.failed if size > self.micro_batch), default=None)
        why = "more samples would pass the budget"
        if above is not None or self.is_whole_batch:
            why = "the whole batch fits" if above is None else f"{above} samples do not fit"
        peak = bytes_said(self.measured[self.micro_batch])
        return (
            f"micro-batch {self.micro_batch}: {why} (budget {bytes_said(self.budget)})\n"
            f"measured peak {peak}, in a step whose effects were undone"
        )


def choose_micro_batch(
    measure: Callable[[int], int | None], *, budget: int, most: int, growth: int = 2
) -> Choice | None:
    """Return the largest size up to `most` that fits; None if one sample does not.

    `measure(size)` returns the peak bytes of a step with micro-batches of `size` samples, or None
    if it ran out of memory. Sizes double (or grow by another factor, `growth`) until the line
    through the last two passes the budget.
    Then the size where it does is tried; if that does not fit, sizes between the largest that fits
    and the smallest that does not.

    >>> choice = choose_micro_batch(lambda size: 100 + max(300, 40 * size), budget=1000, most=512)
    >>> choice.micro_batch, choice.failed, sorted(choice.measured)
    (22, (), [1, 2, 4, 8, 16, 22])
    """
    measured: dict[int, int] = {}
    failed: dict[int, int | None] = {}

    def fits(size: int) -> bool:
        used = measure(size)
        if used is None or used > budget:
            failed[size] = used
            return False
        measured[size] = used
        return True

    size = 1
    while fits(size) and size < most:
        limit = _where_the_budget_ends(measured, budget, most)
        if limit is None or limit > growth * size:
            size = min(most, growth * size)
        elif limit > size:
            size = limit
        else:
            break
    if not measured:
        return None
    while failed:
        low, high = max(measured), min(failed)
        limit = _where_the_budget_ends(measured, budget, high - 1)
        if (high - 1 if limit is None else limit) - low < max(1, low // _CLOSE_ENOUGH):
            break
        size, used = (low + high) // 2, failed[high]
        if used is not None:  # Where the line between the two, above a convex curve, ends.
            share = (budget - measured[low]) / (used - measured[low])
            size = max(low + 1, low + int(share * (high - low)))
        fits(size)
    return Choice(max(measured), budget, measured, tuple(failed), max(measured) == most)


def _where_the_budget_ends(measured: dict[int, int], budget: int, most: int) -> int | None:
    """Return the last size within the budget on the line through the last two sizes."""
    if len(measured) < 2:
        return None
    (small, low), (large, high) = sorted(measured.items())[-2:]
    slope = (high - low) / (large - small)
    return None if slope <= 0 else min(most, large + int((budget - high) / slope))


def resize_batch(batch: Any, samples: int, *, static: Static = ()) -> Any:
    """Return a batch of `samples` samples: the first of `batch`, repeated as often as needed.

    It works on real, fake and meta tensors. Leaves without samples are passed on unchanged.

    >>> resize_batch({"x": torch.tensor([1, 2, 3]), "name": "a"}, 5)
    {'x': tensor([1, 2, 3, 1, 2]), 'name': 'a'}
    """
    if samples < 1:
        raise OptionError(f"samples={samples}: must be at least 1")
    layout = layout_of(batch, static=static)
    if samples == layout.size:
        return batch

    def resized(value: Any) -> Any:
        if samples < layout.size:
            return take(value, slice(0, samples))
        times, rest = divmod(samples, layout.size)
        parts = [value] * times + ([take(value, slice(0, rest))] if rest else [])
        if isinstance(value, Tensor):
            return torch.cat(parts)  # Unlike indexing, this keeps the memory format.
        if isinstance(value, (list, tuple)):
            return type(value)(item for part in parts for item in part)
        return take(value, [row % layout.size for row in range(samples)])

    return layout.structure.build(
        [resized(leaf.value) if leaf.batched else leaf.value for leaf in layout.leaves]
    )
