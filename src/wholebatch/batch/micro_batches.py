"""Micro-batches of a batch: by samples, or by tokens sorted by length.

The update does not depend on the order of the samples, so sorting them by length costs nothing. In
the given order, every micro-batch would be as wide as its longest sample. Only columns at the right
end are cut (cutting at the left would shift the positions), and only if the batch says which tokens
are padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from wholebatch.batch.samples import (
    BatchSize,
    Layout,
    Rows,
    Static,
    is_array,
    is_positive,
    layout_of,
    take,
)
from wholebatch.errors import OptionError, SplitError


class Batches(tuple[Any, ...]):
    """A window that consists of several batches."""


def split(
    batch: Any, micro_batch: int | Tokens, *, batch_size: BatchSize = None, static: Static = ()
) -> list[Any]:
    """Split `batch` into micro-batches of the same structure: nothing lost, nothing repeated.

    With a number of samples, the micro-batches are views in the order of the batch, and the last
    one may be smaller. With `tokens(...)` each fits a token budget, and the samples are sorted and
    trimmed.

    >>> import torch
    >>> batch = {"x": torch.arange(10).view(5, 2), "names": list("abcde"), "temperature": 0.5}
    >>> [micro["names"] for micro in split(batch, 2)]
    [['a', 'b'], ['c', 'd'], ['e']]
    >>> split(batch, 2)[2]
    {'x': tensor([[8, 9]]), 'names': ['e'], 'temperature': 0.5}

    Every tensor needs one row for each sample, and every list one item; numbers and tensors with a
    single row are passed on whole. Mappings, dataclasses, named tuples, tuples and lists keep their
    type. `wholebatch.batch.samples` has the whole contract.

    Args:
        batch: Tensors, or any structure of them.
        micro_batch: Samples per micro-batch, or `wb.tokens(...)`.
        batch_size: The number of samples, or a function of the batch that returns it. Default: the
            first dimension of the first tensor.
        static: Names of leaves without samples, to pass on whole: `static=("aux.class_weights",)`.
    """
    return [micro for micro, _ in split_numbered(batch, micro_batch, batch_size, static)]


def split_numbered(
    batch: Any, micro_batch: int | Tokens, batch_size: BatchSize = None, static: Static = ()
) -> list[tuple[Any, Sequence[int]]]:
    """Return the micro-batches, each with the indices of its samples in the batch."""
    if not isinstance(micro_batch, Tokens) and not is_positive(micro_batch):
        raise OptionError(
            f"micro_batch={micro_batch!r}: must be a positive number of samples or "
            "wholebatch.tokens(budget)"
        )
    layout = layout_of(batch, batch_size=batch_size, static=static)
    if isinstance(micro_batch, Tokens):
        return token_micro_batches(layout, micro_batch)
    return layout.parts(micro_batch)


def joined(
    batches: Sequence[Any],
    by: Tokens | None = None,
    *,
    batch_size: BatchSize = None,
    static: Static = (),
) -> Any:
    """Return these batches as one; None if they differ in more than their number of samples.

    With `by`, they may differ in width as well, if they have a mask: narrower ones are padded on
    the right, each leaf with the value that it has where the mask is zero. A leaf without such a
    value, or with several, cannot be padded.

    >>> import torch
    >>> parts = [{"x": torch.ones(2, 3), "t": 0.5}, {"x": torch.zeros(1, 3), "t": 0.5}]
    >>> joined(parts)["x"].shape, joined([*parts, {"x": torch.zeros(1, 4), "t": 0.5}])
    (torch.Size([3, 3]), None)
    """
    layouts = [layout_of(batch, batch_size=batch_size, static=static) for batch in batches]
    first, *others = layouts
    kinds = [(leaf.name, leaf.batched) for leaf in first.leaves]
    if any(kinds != [(leaf.name, leaf.batched) for leaf in other.leaves] for other in others):
        return None
    lengths = [(None, None) if by is None else lengths_of(layout, by) for layout in layouts]
    widths = [None if known is None else width for known, width in lengths]  # of padded ones
    values = []
    for index, leaf in enumerate(first.leaves):
        column = [layout.leaves[index].value for layout in layouts]
        if not leaf.batched:
            if any(
                value is not leaf.value and not _is_equal(value, leaf.value) for value in column
            ):
                return None
            values.append(leaf.value)
            continue
        if all(isinstance(value, list) for value in column):
            values.append([sample for value in column for sample in value])
            continue
        if not all(
            isinstance(value, Tensor) and value.dtype is column[0].dtype for value in column
        ):
            return None
        parts = _of_one_width(column, widths, partial(_filler, layouts, index, by))
        if parts is None:
            return None
        values.append(torch.cat(parts))
    return first.structure.build(values)


def _filler(layouts: Sequence[Layout], index: int, by: Tokens | None) -> float | None:
    """Return the one value of a leaf where the mask is zero; None if there is none, or several."""
    padding = []
    for layout in layouts:
        real = _real_tokens(_arrays_of(layout), None if by is None else by.mask)
        value = layout.leaves[index].value
        if real is not None and value.shape[:2] == real.shape:
            padding.append(value[~real.to(value.device)].flatten())
    values = torch.cat(padding).unique() if padding else torch.empty(0)
    return values[0].item() if len(values) == 1 else None


def _of_one_width(
    tensors: list[Tensor], widths: Sequence[int | None], filler_of: Callable[[], float | None]
) -> list[Tensor] | None:
    """Pad the tokens of each tensor to the widest; None if that is not possible."""
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return tensors
    if len({tensor.shape[2:] for tensor in tensors}) > 1 or any(
        tensor.dim() < 2 or tensor.shape[1] != width
        for tensor, width in zip(tensors, widths, strict=True)
    ):
        return None
    widest, filler = max(tensor.shape[1] for tensor in tensors), filler_of()
    if filler is None:
        return None
    return [
        functional.pad(
            tensor, (0, 0) * (tensor.dim() - 2) + (0, widest - tensor.shape[1]), value=filler
        )
        for tensor in tensors
    ]


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        both = isinstance(value, Tensor) and isinstance(other, Tensor)
        return both and torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)


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
        sort: Sort the samples by length. False keeps their order.
        multiple: Trim to multiples of this many tokens. Micro-batches then have few shapes, and
            each shape has its own compiled graph.
    """

    budget: int
    _: KW_ONLY
    mask: str | None = None
    sort: bool = True
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

    def __str__(self) -> str:
        return f"{self.budget} tokens"


tokens = Tokens  # as one writes it: `micro_batch=wb.tokens(4096)`


def check_micro_batch(micro_batch: Any) -> int | Tokens | Literal["auto"]:
    """Return the option; refuse it unless it is a number of samples, "auto" or a token budget."""
    if isinstance(micro_batch, Tokens):
        return micro_batch
    if isinstance(micro_batch, str) and micro_batch == "auto":
        return "auto"
    if not is_positive(micro_batch):
        raise OptionError(
            f'micro_batch={micro_batch!r}: must be a positive number of samples, "auto", or '
            "wb.tokens(4096)"
        )
    return int(micro_batch)


def lengths_of(layout: Layout, by: Tokens) -> tuple[list[int] | None, int | None]:
    """Return the length of each sample (None if unknown), and the width of the batch."""
    arrays = _arrays_of(layout)
    real = _real_tokens(arrays, by.mask)
    if real is None:  # the first [samples, tokens], else the first [samples, tokens, ...]
        widths = [value.shape[1] for value in sorted(arrays.values(), key=lambda it: it.ndim > 2)]
        return None, int(widths[0]) if widths else None
    ends, width = _ends(real), int(real.shape[1])
    # Where values beyond the mask are no padding (targets that count), no token is trimmed.
    return ends if _is_padding_beyond(ends, arrays, width) else [width] * len(ends), width


def _is_padding_beyond(ends: list[int], arrays: Mapping[str, Any], width: int) -> bool:
    """True if each leaf [samples, tokens] holds one value beyond the ends: it tells nothing.

    Positions are padding, too: they count on in the columns, or stay at the sample's length.
    """
    if not ends or min(ends) == width:
        return True
    for leaf in arrays.values():
        if leaf.ndim != 2 or leaf.shape[1] != width:
            continue
        values = _dense(leaf)
        values = values.int() if values.dtype is torch.bool else values
        lengths = torch.tensor(ends, device=values.device)[:, None]
        columns = torch.arange(width, device=values.device)[None]
        beyond = columns >= lengths
        offsets = (torch.zeros_like(columns), columns, lengths)
        if not any(bool(_is_one(values[beyond] - by.expand_as(beyond)[beyond])) for by in offsets):
            return False
    return True


def _is_one(values: Tensor) -> Tensor:
    return (values == values[:1]).all()


def _arrays_of(layout: Layout) -> dict[str, Any]:
    """Return the leaves that may be [samples, tokens, ...], by name."""
    return {
        leaf.name: leaf.value
        for leaf in layout.leaves
        if leaf.batched and is_array(leaf.value) and leaf.value.ndim >= 2
    }


def _real_tokens(arrays: Mapping[str, Any], mask: str | None) -> Tensor | None:
    """Return True for each real token: by the mask that is named, else by an `attention_mask`."""
    leaf = arrays.get(mask or "attention_mask")
    if leaf is not None and leaf.ndim == 2:
        values = _dense(leaf)
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


def _dense(value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def token_micro_batches(layout: Layout, by: Tokens) -> list[tuple[Any, Sequence[int]]]:
    """Return the micro-batches under a token budget, each with its samples' indices in the batch.

    The longest samples come first.
    """
    lengths, width = lengths_of(layout, by)
    if width is None:
        raise SplitError(
            f"tokens({by.budget}): no leaf is [samples, tokens]; give one, or split by a number of "
            "samples"
        )
    trimmed: set[int] = set()
    if lengths is None:
        lengths = [width] * layout.size
    else:
        trimmed = _trimmed(layout, width)
        lengths = [_rounded(length, by, width) for length in lengths]
    return [
        (_micro_batch(layout, rows, trimmed, max(1, *(lengths[row] for row in rows))), rows)
        for rows in _pack(lengths, by)
    ]


def without_padding(layout: Layout, by: Tokens, count: int) -> tuple[Any, Any] | None:
    """Return a few short samples as given, and trimmed; None if nothing is trimmed of them."""
    lengths, width = lengths_of(layout, by)
    if lengths is None or width is None:
        return None
    ends = [_rounded(length, by, width) for length in lengths]
    rows = sorted((row for row in range(layout.size) if ends[row] < width), key=ends.__getitem__)
    if not rows[:count]:
        return None
    few = rows[:count]
    trimmed = _trimmed(layout, width)
    return layout.take(few), _micro_batch(layout, few, trimmed, max(1, ends[few[-1]]))


def _rounded(length: int, by: Tokens, width: int) -> int:
    """Round up to the next multiple, but not beyond the batch's width, nor beyond the budget."""
    rounded = min(-(-length // by.multiple) * by.multiple, width)
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


def _micro_batch(layout: Layout, rows: list[int], trimmed: set[int], width: int) -> Any:
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
    width = min(width, value.shape[1])
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return value.index_select(1, torch.arange(width, device=value.device))
    return value[:, :width]


def _trimmed(layout: Layout, width: int) -> set[int]:
    """Return the indices of the leaves to trim: [samples, tokens, ...]."""
    trimmed: set[int] = set()
    for index, leaf in enumerate(layout.leaves):
        if not leaf.batched or not is_array(leaf.value) or width < 2:
            continue
        shape = tuple(leaf.value.shape)
        if width in shape[2:]:
            raise SplitError(
                f"the leaf {leaf.name!r} is {shape}, and the batch is {width} tokens wide: only "
                "the second dimension of a leaf is trimmed. Make this tensor inside the loss "
                "function, from one that is [samples, tokens], or split by a number of samples"
            )
        if width in shape[1:2]:
            trimmed.add(index)
    return trimmed
