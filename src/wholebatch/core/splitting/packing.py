"""Packing of samples into micro-batches under a token budget, with their padding trimmed.

The update does not depend on the order of the samples, so sorting them by length costs nothing. In
the given order, every micro-batch would be as wide as its longest sample. Only columns at the right
end are cut (cutting at the left would shift the positions), and only if the batch says which tokens
are padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.core.splitting.layout import Layout, Rows, take
from wholebatch.core.splitting.lengths import lengths_of, named
from wholebatch.core.splitting.structure import is_array
from wholebatch.core.splitting.token_budget import Tokens
from wholebatch.errors import SplitError

__all__ = ["token_micro_batches"]


def token_micro_batches(layout: Layout, by: Tokens) -> list[tuple[Any, Sequence[int]]]:
    """Return the micro-batches under a token budget, each with its samples' indices in the batch.

    The longest samples come first.
    """
    lengths, width = lengths_of(layout, by)
    cuts: dict[int, tuple[int, ...]] = {}
    if lengths is not None and width is not None:
        cuts = _cuts(layout, by, width)
    elif by.trim:
        raise SplitError(
            "tokens(trim=...): the batch does not say what is padding; give mask=, pad= or lengths="
        )
    if lengths is None:
        if width is None:
            raise SplitError(
                f"tokens({by.budget}): no leaf is [samples, tokens]; say lengths= (the name of a "
                "leaf with the length of each sample), or split by a number of samples"
            )
        lengths = [width] * layout.size
    elif by.multiple > 1 and width is not None:
        lengths = [_rounded(length, by, width) for length in lengths]
    return [
        (_micro_batch(layout, rows, cuts, max(1, *(lengths[row] for row in rows))), rows)
        for rows in _pack(lengths, by)
    ]


def _rounded(length: int, by: Tokens, width: int) -> int:
    """Round up to the next multiple, but not beyond the batch's width, nor beyond the budget."""
    rounded = min(-(-max(length, 1) // by.multiple) * by.multiple, width)
    return rounded if rounded <= by.budget else length


def _pack(lengths: list[int], by: Tokens) -> list[list[int]]:
    """Return which samples go together: filled greedily, in the given order or longest first."""
    order = list(range(len(lengths)))
    if by.sort:
        order.sort(key=lambda row: -lengths[row])
    packs: list[list[int]] = []
    longest = 0
    for row in order:
        length = max(lengths[row], 1)
        if length > by.budget:
            raise SplitError(
                f"sample {row} is {length} tokens long, more than the budget of {by.budget}: "
                f"raise the budget to {max(lengths)} or more, or shorten the samples"
            )
        longest = max(longest, length)
        if packs and (len(packs[-1]) + 1) * longest <= by.budget:
            packs[-1].append(row)
        else:
            packs.append([row])
            longest = length
    return packs


def _micro_batch(
    layout: Layout, rows: list[int], cuts: Mapping[int, tuple[int, ...]], width: int
) -> Any:
    # Neighbours in order are a slice, which needs no copy.
    run = rows == list(range(rows[0], rows[0] + len(rows)))
    picked: Rows = slice(rows[0], rows[0] + len(rows)) if run else rows
    values = []
    for index, (leaf, batched) in enumerate(zip(layout.leaves, layout.batched, strict=True)):
        value = leaf.value
        for dim in cuts.get(index, ()):
            value = _narrow(value, dim, width)
        values.append(take(value, picked) if batched else value)
    return layout.structure.build(values)


def _narrow(value: Any, dim: int, width: int) -> Any:
    width = min(width, value.shape[dim])
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            return value.narrow(dim, 0, width)
        return value.index_select(dim, torch.arange(width, device=value.device))
    return value[(slice(None),) * dim + (slice(width),)]


def _cuts(layout: Layout, by: Tokens, width: int) -> dict[int, tuple[int, ...]]:
    """Return the dimensions to trim, by the index of each trimmed leaf in the layout."""
    trim = by.trim or {}
    for name in trim:
        named(layout, name, "trim")
    cuts = {}
    for index, (leaf, batched) in enumerate(zip(layout.leaves, layout.batched, strict=True)):
        if not is_array(leaf.value):
            continue
        shape = tuple(leaf.value.shape)
        dims = trim.get(leaf.name)
        if dims is not None:
            for dim in dims:
                if dim >= len(shape) or shape[dim] != width or (batched and dim == 0):
                    raise SplitError(
                        f"tokens(trim={{{leaf.name!r}: {dims}}}): dimension {dim} of {shape} is "
                        f"not the {width} tokens of the batch"
                    )
        else:
            dims = tuple(dim for dim in range(1, len(shape)) if shape[dim] == width)
            if not batched or width < 2:
                dims = ()
            elif dims not in ((), (1,)):
                raise SplitError(
                    f"the leaf {leaf.name!r} is {shape}, and the batch is {width} tokens wide: "
                    f"cannot tell which dimensions are tokens; say trim={{{leaf.name!r}: {dims}}} "
                    "(those that are), or () for none"
                )
        if dims:
            cuts[index] = dims
    return cuts
