"""Micro-batches put together again into the batch that they are parts of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.core.splitting import batch_size_of
from wholebatch.core.splitting.samples import layout_of
from wholebatch.errors import WholebatchError

__all__ = ["joined", "thinned"]


def joined(micros: Sequence[Any]) -> Any | None:
    """The whole batch; None where the micro-batches do not fit together (other paddings).

    >>> joined([{"x": torch.ones(2, 3), "t": 0.5}, {"x": torch.zeros(1, 3), "t": 0.5}])["x"].shape
    torch.Size([3, 3])
    """
    try:
        layouts = [layout_of(micro) for micro in micros]
        leaves = []
        for index, leaf in enumerate(layouts[0].leaves):
            values = [layout.leaves[index].value for layout in layouts]
            if not layouts[0].batched[index]:
                leaves.append(leaf.value)
            elif isinstance(leaf.value, Tensor):
                leaves.append(torch.cat(values))
            elif isinstance(leaf.value, list):
                leaves.append([item for value in values for item in value])
            else:
                return None
        return layouts[0].structure.build(leaves)
    except (WholebatchError, RuntimeError, IndexError, TypeError):
        return None


def thinned(micros: Sequence[Any]) -> list[Any]:
    """The same micro-batches with very different numbers of samples, where they have several."""
    result = []
    for index, micro in enumerate(micros):
        size = batch_size_of(micro)
        keep = max(1, size - index * size // max(len(micros), 2))
        result.append(layout_of(micro).take(slice(0, keep)) if keep < size else micro)
    return result
