"""A differentiable gather of a tensor's rows from all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wholebatch.distributed import Sync

__all__ = ["Gathered"]


class Gathered:
    """A differentiable gather along the first dimension (the samples), in the order of the ranks.

    Ranks may have different numbers of samples. The backward sums the gradients of all ranks for
    each row, so a loss that every rank computes must be divided by the number of ranks.
    """

    def __init__(self, sync: Sync) -> None:
        self._sync = sync

    def __call__(self, tensor: Tensor) -> Tensor:
        sync = self._sync
        counts = [0.0] * sync.ranks
        counts[sync.rank] = float(len(tensor))
        sizes = [int(size) for size in sync.sum(counts)]
        start = sum(sizes[: sync.rank])
        if not tensor.is_floating_point():
            wide = tensor.to(torch.int64) if tensor.dtype is torch.bool else tensor
            return _spread(wide, start, sum(sizes), sync.sum_tensor).to(tensor.dtype)
        gathered: Tensor = _Gather.apply(tensor, start, sum(sizes), sync.sum_tensor)  # type: ignore[no-untyped-call]
        return gathered


def _spread(tensor: Tensor, start: int, rows: int, summed: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the rows of all ranks: place own rows among zeros and sum over ranks, exactly."""
    whole = tensor.new_zeros((rows, *tensor.shape[1:]))
    whole[start : start + len(tensor)] = tensor
    return summed(whole)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, start: int, rows: int, summed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.start, ctx.count, ctx.summed = start, len(tensor), summed
        return _spread(tensor, start, rows, summed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        summed = ctx.summed(gradient.contiguous())
        return summed[ctx.start : ctx.start + ctx.count], None, None, None
