"""Sums and maxima over process groups, waiting only for ranks that are alive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wholebatch.distributed.rank_failure import alarm
from wholebatch.distributed.wait_time import Waiting

__all__ = ["Group"]


class Group:
    """The data-parallel ranks: one process group, or one for each dimension of a mesh."""

    def __init__(
        self, groups: Sequence[dist.ProcessGroup | None], device: torch.device, *, rank: int
    ) -> None:
        self._groups = tuple(groups)
        self._device = device
        self.rank = rank
        self.waiting = Waiting(device)
        self.ranks = 1
        for group in self._groups:
            self.ranks *= dist.get_world_size(group)
        if self.ranks > 1:
            alarm()  # from now on: a rank may fail before its first collective

    def sum(self, values: Sequence[float]) -> list[float]:
        vector = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        with alarm().progress.waiting():  # on CUDA the host waits for the numbers
            summed: list[float] = self._reduced(vector, dist.ReduceOp.SUM).tolist()
        return summed

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor.detach().clone(), dist.ReduceOp.SUM)

    def largest(self, value: Tensor) -> Tensor:
        return self._reduced(value.detach().clone(), dist.ReduceOp.MAX)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """The tensors of the first rank, to all."""
        for group in self._groups:
            source = dist.get_global_rank(group, 0) if group is not None else 0
            for tensor in tensors:
                self.wait(dist.broadcast(tensor, source, group=group, async_op=True))

    def wait(self, work: dist.Work) -> None:
        with self.waiting.measured(), alarm().progress.waiting():
            if self._device.type == "cuda":
                work.wait()  # orders the streams; the host does not stop here
            else:
                alarm().wait(work)

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        for group in self._groups:
            self.wait(dist.all_reduce(tensor, op=operation, group=group, async_op=True))
        return tensor
