"""The norm of gradients that lie on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["total_norm"]

_PIECE = 2**20


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm over all gradients in float64, from norms of pieces.

    On the CPU the norm of one long row in float32 loses digits with its length; norms of pieces
    that are added up in float64 do not.
    """
    norms = [
        torch.linalg.vector_norm(piece)
        for gradient in gradients
        for piece in _row(gradient).split(_PIECE)
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))
    if not bool(torch.isfinite(total)):  # squares overflow in float32 where numbers do not
        total = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients])
        )
    return total


def _row(gradient: Tensor) -> Tensor:
    """Its elements in whatever order, without a copy where they lie side by side."""
    if gradient.is_contiguous():
        return gradient.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(gradient):
        return gradient.as_strided((gradient.numel(),), (1,))
    return gradient.reshape(-1)
