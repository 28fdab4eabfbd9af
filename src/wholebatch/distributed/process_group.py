"""Collectives over process groups, waiting only for ranks that are alive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wholebatch.distributed import Sync
from wholebatch.distributed.rank_failure import alarm

__all__ = ["Gathered", "Group", "Waiting"]


class Waiting:
    """The time that a rank waited for the others: on a CPU by the clock, on CUDA by events.

    It is the part of communication that no computation hid. The host does not stop at a CUDA
    collective, the stream does: the device stood still between an event before the wait and one
    after it. Events are read when they are over, so reading them waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure one wait within this context."""
        if self._device.type != "cuda":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        before.record(stream)
        yield
        after.record(stream)
        self._open.append((before, after))

    @property
    def seconds(self) -> float:
        """The seconds of all waits that are over."""
        while self._open and self._open[0][1].query():
            before, after = self._open.pop(0)
            self._seconds += before.elapsed_time(after) / 1e3
        return self._seconds


class Group:
    """The data-parallel ranks: one process group, or one for each dimension of a mesh."""

    def __init__(
        self, groups: Sequence[dist.ProcessGroup | None], device: torch.device, *, rank: int
    ) -> None:
        self._groups = tuple(groups)
        self._device = device
        self.rank = rank
        self.waiting = Waiting(device)
        self.size = 1
        for group in self._groups:
            self.size *= dist.get_world_size(group)
        if self.size > 1:
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

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over the gradients of all ranks, each of which holds different ones.

        Ranks may hold different numbers of gradients, so each sums its squares first, in float64.
        """
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for gradient in gradients:
            square += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        return self.sum_tensor(square).sqrt()

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of the first rank to all."""
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
