"""Batches of another size, made from a given one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wholebatch.core.splitting.samples import Static, flatten, layout_of, take
from wholebatch.errors import OptionError

__all__ = ["map_tensors", "resize_batch"]


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nested batch with `function` applied to every tensor."""
    leaves, structure = flatten(batch)
    return structure.build(
        [function(leaf.value) if isinstance(leaf.value, Tensor) else leaf.value for leaf in leaves]
    )


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
            return type(value)(one for part in parts for one in part)
        return take(value, [row % layout.size for row in range(samples)])

    return layout.structure.build(
        [
            resized(leaf.value) if batched else leaf.value
            for leaf, batched in zip(layout.leaves, layout.batched, strict=True)
        ]
    )
