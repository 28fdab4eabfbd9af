"""Contrastive losses, for the whole batch at once (`wb.Coupled`).

They compute the similarity matrix a few rows at a time, forward and backward, so memory is linear
in the batch. Each returns a sum over samples and the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from wholebatch.errors import LossError, OptionError
from wholebatch.losses.loss import Loss, OfTheBatch

_CHUNK = 1 << 25  # Similarities at a time: 128 MiB in float32.


def clip_loss(
    a: Tensor,
    b: Tensor,
    *,
    scale: Tensor | float = 1 / 0.07,
    symmetric: bool = True,
    normalise: bool = True,
    rows: int | None = None,
) -> Loss:
    """Return InfoNCE between two views of the same samples: row i of `a` matches row i of `b`.

    This is the sum over samples of the cross entropy of `scale · a_i · b_j` over j, with target i;
    with `symmetric` the mean of both directions, as in CLIP.

    >>> a, b = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    >>> loss = clip_loss(a, b, rows=2)
    >>> loss.units
    6

    Args:
        a: Representations of one view, `[samples, features]`.
        b: Representations of the other view.
        scale: Factor of the similarities: 1 / temperature.
        symmetric: Average both directions.
        normalise: Scale every representation to length 1 first.
        rows: Rows of the similarity matrix computed at a time. Default: 2^25 similarities.
    """
    a, b, rows = _checked(a, b, normalise, rows)

    def part(some: Tensor, others: Tensor, scale: Tensor | float, first: int) -> Tensor:
        answers = torch.arange(first, first + len(some), device=some.device)
        return F.cross_entropy(scale * (some @ others.T), answers, reduction="sum")

    total = _in_rows(part, a, b, scale, rows)
    if symmetric:
        total = (total + _in_rows(part, b, a, scale, rows)) / 2
    return OfTheBatch(total, len(a))


def info_nce(
    queries: Tensor,
    keys: Tensor,
    *,
    temperature: Tensor | float = 0.07,
    normalise: bool = True,
    rows: int | None = None,
) -> Loss:
    """Return InfoNCE in one direction: query i must find key i among all keys of the batch.

    >>> info_nce(torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)).units
    6

    Args:
        queries: Representations of the queries, `[samples, features]`.
        keys: Representations of the keys.
        temperature: The similarities are divided by it.
        normalise: Scale every representation to length 1 first.
        rows: Rows of the similarity matrix computed at a time. Default: 2^25 similarities.
    """
    return clip_loss(
        queries, keys, scale=1.0 / temperature, symmetric=False, normalise=normalise, rows=rows
    )


def _in_rows(
    part: Callable[..., Tensor], some: Tensor, others: Tensor, extra: Any, rows: int
) -> Tensor:
    """Return the sum of `part` over slices of `some`, each recomputed in the backward pass."""
    total = some.new_zeros(())
    for first in range(0, len(some), rows):
        piece = some[first : first + rows]
        total = total + checkpoint(
            part, piece, others, extra, first, use_reentrant=False, preserve_rng_state=False
        )
    return total


def _checked(a: Tensor, b: Tensor, normalise: bool, rows: int | None) -> tuple[Tensor, Tensor, int]:
    """Return both, normalised if so, and the number of rows at a time: as given, or for a chunk."""
    if a.dim() != 2 or a.shape != b.shape:
        raise LossError(
            f"representations of shapes {tuple(a.shape)} and {tuple(b.shape)}: both must be "
            "(samples, features)"
        )
    rows = max(1, _CHUNK // max(1, len(b))) if rows is None else rows
    if rows < 1:
        raise OptionError(f"rows={rows}: must be a positive number of rows, or None")
    if normalise:
        a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    return a, b, rows
