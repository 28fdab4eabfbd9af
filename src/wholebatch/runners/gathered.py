"""A tensor's rows of all ranks, with a gradient that finds its way back to each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wholebatch.sync import Sync

__all__ = ["Gathered"]


class Gathered:
    """Gathers tensors that have their samples as the first dimension, in the order of the ranks.

    Ranks may have different numbers of samples. The backward adds up what every rank sends to a
    row, so a loss that all ranks compute alike is to be divided by their number.
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
    """Own rows among zeros, summed over the ranks: each number plus zeros is itself."""
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
