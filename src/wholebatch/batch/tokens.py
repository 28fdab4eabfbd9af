"""Micro-batches by tokens: sorted by length, and trimmed.

The update does not depend on the order of the samples, so sorting them by length costs nothing. In
the given order, every micro-batch would be as wide as its longest sample. Only columns at the right
end are cut (cutting at the left would shift the positions), and only if the batch says which tokens
are padding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wholebatch.batch.samples import Layout, Leaf, Rows, is_array, is_positive, take
from wholebatch.errors import OptionError, SplitError


@dataclass(frozen=True)
class Tokens:
    """A micro-batch size of at most `budget` padded tokens, for `split` and `WholeBatch`.

    The length of a sample comes from `mask`, by default the "attention_mask" of the batch. Without
    one, nothing is trimmed, and every sample counts as many tokens as the batch is wide. A loss
    that counts what the mask hides is refused before the first window.

    >>> import torch, wholebatch as wb
    >>> batch = {
    ...     "input_ids": torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 7], [8, 9, 0, 0]]),
    ... }
    >>> batch["real"] = batch["input_ids"] != 0
    >>> [micro["input_ids"].tolist() for micro in wb.split(batch, wb.tokens(6, mask="real"))]
    [[[4, 5, 6, 7]], [[1, 2], [8, 9], [3, 0]]]

    Args:
        budget: The most tokens of a micro-batch, padding included.
        mask: The name of a `[samples, tokens]` leaf that is nonzero for real tokens.
        trim: The names of the leaves to trim, `[samples, tokens, ...]`. Default: the leaves
            `[samples, tokens]` that were as wide as the mask in the first batch.
        multiple: Trim to multiples of this many tokens. Micro-batches then have few shapes, and
            each shape has its own compiled graph.
    """

    budget: int
    _: KW_ONLY
    mask: str | None = None
    trim: str | Sequence[str] | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        if not is_positive(self.budget):
            raise OptionError(f"tokens({self.budget!r}): must be a positive number of tokens")
        if not is_positive(self.multiple):
            raise OptionError(
                f"tokens(multiple={self.multiple!r}): must be a positive number of tokens"
            )
        if self.mask is not None and not (isinstance(self.mask, str) and self.mask):
            raise OptionError(
                f"tokens(mask={self.mask!r}): must be the name of a leaf of the batch"
            )

        if self.trim is not None:
            names = (self.trim,) if isinstance(self.trim, str) else tuple(self.trim)
            if not names or not all(isinstance(name, str) and name for name in names):
                raise OptionError(
                    f"tokens(trim={self.trim!r}): must be names of leaves of the batch"
                )
            object.__setattr__(self, "trim", names)

    def __str__(self) -> str:
        return f"{self.budget} tokens"


tokens = Tokens  # as one writes it: `micro_batch=wb.tokens(4096)`


class Text(NamedTuple):
    """The text of a batch: what is padding, and what is trimmed with it."""

    lengths: list[int] | None
    """The tokens of each sample; None if the batch does not say what is padding."""
    width: int | None
    """The tokens of the batch with padding; None without a leaf [samples, tokens]."""
    trimmed: frozenset[int] = frozenset()
    """The indices of the leaves to trim."""


def text_of(layout: Layout, by: Tokens) -> Text:
    """Return the lengths of the samples, the width of the batch and the leaves to trim."""
    real = real_tokens(layout, by.mask)
    if real is None:  # the first [samples, tokens], else the first [samples, tokens, ...]
        shapes = sorted((array.shape for array in _arrays_of(layout).values()), key=_is_longer)
        return Text(None, int(shapes[0][1]) if shapes else None)
    ends, width = _ends(real), int(real.shape[1])
    trimmed = _named(layout, by.trim, width) if by.trim else _as_wide(layout, width)
    leaves = [layout.leaves[index].value for index in sorted(trimmed)]
    # Where values beyond the mask are no padding (targets that count), no token is trimmed.
    if not by.trim and not _is_padding_beyond(ends, leaves):
        ends = [width] * len(ends)
    return Text(ends, width, trimmed)


def _is_longer(shape: Sequence[int]) -> bool:
    return len(shape) > 2


def _named(layout: Layout, names: str | Sequence[str], width: int) -> frozenset[int]:
    """Return the indices of the leaves that the user wants trimmed."""
    places = {leaf.name: index for index, leaf in enumerate(layout.leaves)}
    for name in names:
        leaf = layout.leaves[places[name]] if name in places else None
        if leaf is None or not leaf.batched or not _has_tokens(leaf, width):
            what = "the batch has no such leaf"
            if leaf is not None:
                shape = tuple(leaf.value.shape) if is_array(leaf.value) else type(leaf.value)
                what = f"it is {shape}, and the text is {width} wide"
            raise SplitError(f"tokens(trim=): {name!r} must be [samples, tokens, ...]: {what}")
    return frozenset(places[name] for name in names)


def _has_tokens(leaf: Leaf, width: int) -> bool:
    return is_array(leaf.value) and leaf.value.ndim >= 2 and leaf.value.shape[1] == width


def _as_wide(layout: Layout, width: int) -> frozenset[int]:
    """Return the indices of the leaves [samples, tokens] that were as wide as the first text."""
    trimmed = set()
    for index, leaf in enumerate(layout.leaves):
        if leaf.batched and is_array(leaf.value) and leaf.value.ndim == 2:
            is_text = leaf.value.shape[1] == width
            if layout.roles is not None:
                is_text = layout.roles.is_text(leaf.name, is_text)
            if is_text:
                trimmed.add(index)
    return frozenset(trimmed)


def _is_padding_beyond(ends: list[int], leaves: Sequence[Any]) -> bool:
    """True if each leaf [samples, tokens] holds one value beyond the ends: it tells nothing."""
    for leaf in leaves:
        values = torch.as_tensor(leaf)
        columns = torch.arange(values.shape[1], device=values.device)
        beyond = values[columns >= torch.tensor(ends, device=values.device)[:, None]]
        if not bool((beyond == beyond[:1]).all()):
            return False
    return True


def _arrays_of(layout: Layout) -> dict[str, Any]:
    """Return the leaves that may be [samples, tokens, ...], by name."""
    return {
        leaf.name: leaf.value
        for leaf in layout.leaves
        if leaf.batched and is_array(leaf.value) and leaf.value.ndim >= 2
    }


def real_tokens(layout: Layout, mask: str | None) -> Tensor | None:
    """Return True for each real token: by the mask that is named, else by an `attention_mask`."""
    arrays = _arrays_of(layout)
    leaf = arrays.get(mask or "attention_mask")
    if leaf is not None and leaf.ndim == 2:
        values = torch.as_tensor(leaf)
        if not values.is_floating_point() or not bool((values < 0).any()):
            return values != 0
    if mask is None:
        return None
    leaves = ", ".join(f"{name} {tuple(value.shape)}" for name, value in arrays.items())
    raise SplitError(
        f"tokens(mask={mask!r}): must name a leaf [samples, tokens] that is nonzero where a token "
        f"is real, without negative values (an additive attention mask has them); the batch has "
        f"{leaves or 'no leaf with tokens'}"
    )


def _ends(real: Tensor) -> list[int]:
    """Return the index after each sample's last real token: holes and left padding are kept."""
    if real.shape[1] == 0:
        return [0] * len(real)
    places = torch.arange(1, real.shape[1] + 1, device=real.device)
    ends: list[int] = (real * places).amax(dim=1).tolist()
    return ends


def token_micro_batches(layout: Layout, by: Tokens) -> list[tuple[Any, Sequence[int]]]:
    """Return the micro-batches under a token budget, each with its samples' indices in the batch.

    The longest samples come first.
    """
    lengths, width, trimmed = text_of(layout, by)
    if width is None:
        raise SplitError(
            f"tokens({by.budget}): no leaf is [samples, tokens]; give one, or split by a number of "
            "samples"
        )
    if lengths is None:
        lengths = [width] * layout.size
    else:
        lengths = [_rounded(length, by, width) for length in lengths]
    return [
        (_micro_batch(layout, rows, trimmed, max(1, *(lengths[row] for row in rows))), rows)
        for rows in _pack(lengths, by)
    ]


def without_padding(layout: Layout, by: Tokens, count: int) -> tuple[Any, Any] | None:
    """Return a few short samples as given, and trimmed; None if nothing is trimmed of them."""
    lengths, width, trimmed = text_of(layout, by)
    if lengths is None or width is None:
        return None
    ends = [_rounded(length, by, width) for length in lengths]
    rows = sorted((row for row in range(layout.size) if ends[row] < width), key=ends.__getitem__)
    if not rows[:count]:
        return None
    few = rows[:count]
    return layout.take(few), _micro_batch(layout, few, trimmed, max(1, ends[few[-1]]))


def _rounded(length: int, by: Tokens, width: int) -> int:
    """Round up to the next multiple, but not beyond the batch's width, nor beyond the budget."""
    rounded = min(-(-length // by.multiple) * by.multiple, width)
    return rounded if rounded <= by.budget else length


def _pack(lengths: list[int], by: Tokens) -> list[list[int]]:
    """Return which samples go together: filled greedily, the longest first."""
    packs: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = max(lengths[row], 1)
        if length > by.budget:
            raise SplitError(
                f"sample {row} is {length} tokens long, more than the budget of {by.budget}: "
                f"raise the budget to {max(lengths)} or more, or shorten the samples"
            )
        if packs and (len(packs[-1]) + 1) * width <= by.budget:
            packs[-1].append(row)
        else:
            packs.append([row])
            width = length
    return packs


def _micro_batch(layout: Layout, rows: list[int], trimmed: Collection[int], width: int) -> Any:
    # Neighbours in order are a slice, which needs no copy.
    run = rows == list(range(rows[0], rows[0] + len(rows)))
    picked: Rows = slice(rows[0], rows[0] + len(rows)) if run else rows
    values = []
    for index, leaf in enumerate(layout.leaves):
        value = leaf.value
        if index in trimmed:
            value = _narrow(value, width)
        values.append(take(value, picked) if leaf.batched else value)
    return layout.structure.build(values)


def _narrow(value: Any, width: int) -> Any:
    """Return the first `width` tokens of each sample."""
    return value[:, :width]
