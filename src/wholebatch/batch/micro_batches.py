"""Batches, split into micro-batches and joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from wholebatch.batch.roles import Roles
from wholebatch.batch.samples import BatchSize, Layout, Static, is_positive, layout_of
from wholebatch.batch.tokens import Tokens, real_tokens, text_of, token_micro_batches
from wholebatch.errors import OptionError


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
    batch: Any,
    micro_batch: int | Tokens,
    batch_size: BatchSize = None,
    static: Static = (),
    roles: Roles | None = None,
) -> list[tuple[Any, Sequence[int]]]:
    """Return the micro-batches, each with the indices of its samples in the batch."""
    if not isinstance(micro_batch, Tokens) and not is_positive(micro_batch):
        raise OptionError(
            f"micro_batch={micro_batch!r}: must be a positive number of samples or "
            "wholebatch.tokens(budget)"
        )
    layout = layout_of(batch, batch_size=batch_size, static=static, roles=roles)
    if isinstance(micro_batch, Tokens):
        return token_micro_batches(layout, micro_batch)
    return layout.parts(micro_batch)


def joined(
    batches: Sequence[Any],
    by: Tokens | None = None,
    *,
    batch_size: BatchSize = None,
    static: Static = (),
    roles: Roles | None = None,
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
    layouts = [
        layout_of(batch, batch_size=batch_size, static=static, roles=roles) for batch in batches
    ]
    first, *others = layouts
    kinds = [(leaf.name, leaf.batched) for leaf in first.leaves]
    if any(kinds != [(leaf.name, leaf.batched) for leaf in other.leaves] for other in others):
        return None
    texts = [None if by is None else text_of(layout, by) for layout in layouts]
    widths = [None if text is None or text.lengths is None else text.width for text in texts]
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
        real = None if by is None else real_tokens(layout, by.mask)
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
