"""Division of a batch: `split` into micro-batches, `drop_samples` to keep its first samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wholebatch.core.splitting.layout import BatchSize, Static, is_positive, layout_of
from wholebatch.core.splitting.packing import token_micro_batches
from wholebatch.core.splitting.token_budget import Tokens
from wholebatch.errors import OptionError

__all__ = ["drop_samples", "split", "split_numbered"]


def split(
    batch: Any,
    micro_batch: int | Tokens,
    *,
    batch_size: BatchSize = None,
    static: Static = (),
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

    Tensors, NumPy arrays and lists of samples are split. Mappings, dataclasses, named tuples,
    tuples and lists around them keep their type. Everything else is passed on unchanged. The number
    of samples is the one that fits most leaves. If two numbers fit equally well, give `batch_size`
    (a number, or a function of the batch). `static` names leaves to pass on unchanged although
    their first dimension is the number of samples: `static=("aux.class_weights",)`.
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
    rows = range(layout.size)
    return [
        (layout.take(slice(start, start + micro_batch)), rows[start : start + micro_batch])
        for start in rows[::micro_batch]
    ]


def drop_samples(
    batch: Any, keep: int, *, batch_size: BatchSize = None, static: Static = ()
) -> Any:
    """Return the first `keep` samples of `batch`, as views in the same structure.

    >>> drop_samples({"x": [1, 2, 3, 4]}, 3)
    {'x': [1, 2, 3]}
    """
    layout = layout_of(batch, batch_size=batch_size, static=static)
    if not is_positive(keep) or keep > layout.size:
        raise OptionError(
            f"keep={keep!r}: must be a number of samples from 1 to {layout.size}, the batch's own"
        )
    return batch if keep == layout.size else layout.take(slice(0, keep))
