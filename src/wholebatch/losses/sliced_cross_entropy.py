"""Cross-entropy of a linear layer, with logits computed in slices to save memory.

With a large vocabulary the logits of a micro-batch are its largest tensor by far. Here they are
made and used up in slices of tokens, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from wholebatch.errors import LossError
from wholebatch.losses.loss import Loss, wide

_AT_ONCE = 1 << 26


def rows_at_once(vocabulary: int) -> int:
    """Return the number of tokens per slice, so that its logits take at most 256 MiB."""
    return max(1024, _AT_ONCE // vocabulary // 128 * 128)


def linear_cross_entropy(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Loss:
    """Return the cross-entropy of `head(hidden)`, without ever holding all logits in memory.

    The sum is over the labels that are not -100, and their number is the units. `wb.causal_lm`
    does this for models with `get_output_embeddings()`; this is the form for other models.

    >>> import torch, wholebatch as wb
    >>> head, hidden = torch.nn.Linear(8, 50), torch.randn(2, 5, 8)
    >>> loss = wb.linear_cross_entropy(hidden, head, torch.randint(0, 50, (2, 5)))
    >>> int(loss.units)
    10

    Args:
        hidden: What the output layer is given, `[..., features]`.
        head: The output layer, an `nn.Linear`.
        labels: The right classes, `[...]`. They are not shifted.
    """
    if not isinstance(head, nn.Linear):
        raise LossError(f"head is a {type(head).__name__}: must be an nn.Linear")
    if hidden.shape[:-1] != labels.shape:
        raise LossError(
            f"hidden of shape {tuple(hidden.shape)} and labels of shape {tuple(labels.shape)}: "
            "must be [..., features] and [...]"
        )
    total = sliced_cross_entropy(hidden.flatten(0, -2), head, labels.flatten())
    return Loss(total, (labels != -100).sum())


def sliced_cross_entropy(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of `head(hidden)` with `labels`; -100 is ignored.

    Each slice is checkpointed: its backward computes the logits again. In a graph they are computed
    in the backward only, since no gradient depends on the loss.
    """
    [total] = sums_in_slices(hidden, head, labels, _cross_entropy)
    return total


def sums_in_slices(
    hidden: Tensor,
    head: nn.Linear,
    labels: Tensor,
    of_rows: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
) -> list[Tensor]:
    """Return the sums over all rows that `of_rows(head(hidden), labels)` gives for some of them."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    rows = rows_at_once(head.weight.shape[0])
    sums = []
    for h, y in zip(hidden.split(rows), labels.split(rows), strict=True):
        slice_of = (h, head.weight, head.bias, y, of_rows)
        sums.append(checkpoint(_slice, *slice_of, use_reentrant=False, preserve_rng_state=False))
    return [torch.stack(parts).sum() for parts in zip(*sums, strict=True)]


def _slice(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    of_rows: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Return the sums over some tokens.

    The weight is cast for each slice: the gradients of the slices are then added in its own dtype.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return of_rows(_linear(hidden, weight, bias), labels)


def applied(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return `head(hidden)` in the dtype of `hidden`, whether autocast is on or not."""
    with torch.autocast(hidden.device.type, enabled=False):
        return _linear(hidden, head.weight, head.bias)


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    cast = None if bias is None else bias.to(hidden.dtype)
    return functional.linear(hidden, weight.to(hidden.dtype), cast)


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor]:
    return (functional.cross_entropy(wide(logits), labels, reduction="sum"),)
