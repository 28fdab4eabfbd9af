"""The norm of gradients that lie on the host, for the most part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["norm_of_row", "on_host", "total_norm"]

_ROW = 256
_PIECE = 2**12 * _ROW


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm over all gradients, in float64, from the norms of short rows.

    On the CPU the norm of a long float32 tensor loses digits with its length (4e-4 for a million
    equal numbers); short rows, added up in float64, keep them (2e-7) and are as fast.
    """
    norms = on_host([norm_of_row(_row(gradient)) for gradient in gradients])
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if not bool(torch.isfinite(total)):  # squares overflow in float32 where numbers do not
        wide = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        total = torch.linalg.vector_norm(torch.stack(on_host(wide)))
    return total


def norm_of_row(row: Tensor) -> Tensor:
    """The norm of a flat tensor, in float64."""
    if row.dtype is not torch.float32:
        wide: Tensor = torch.linalg.vector_norm(row, dtype=torch.float64)
        return wide
    even = row.numel() - row.numel() % _ROW
    norms = [
        torch.linalg.vector_norm(torch.linalg.vector_norm(piece.view(-1, _ROW), dim=1).double())
        for piece in row[:even].split(_PIECE)
        if piece.numel()
    ]
    norms.append(torch.linalg.vector_norm(row[even:], dtype=torch.float64))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _row(gradient: Tensor) -> Tensor:
    """Its elements in whatever order, without a copy where they lie side by side."""
    if gradient.is_contiguous():
        return gradient.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(gradient):
        return gradient.as_strided((gradient.numel(),), (1,))
    return gradient.reshape(-1)


def on_host(norms: Sequence[Tensor]) -> list[Tensor]:
    """These numbers, wherever they are: one transfer for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for norm in norms:
        by_device.setdefault(norm.device, []).append(norm)
    return [one for some in by_device.values() for one in torch.stack(some).cpu().unbind()]
