"""Batches, split into micro-batches and joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from wholebatch.batch.roles import Roles
from wholebatch.batch.samples import BatchSize, Static, is_positive, layout_of
from wholebatch.batch.tokens import Tokens, token_micro_batches
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
    *,
    batch_size: BatchSize = None,
    static: Static = (),
    roles: Roles | None = None,
) -> Any:
    """Return these batches as one; None if they differ in more than their number of samples.

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
        if len({value.shape[1:] for value in column}) > 1:
            return None
        values.append(torch.cat(column))
    return first.structure.build(values)


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
