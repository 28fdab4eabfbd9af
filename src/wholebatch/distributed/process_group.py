"""Small collectives over process groups.

A rank that dies ends the job: torchrun stops the others. A rank that hangs ends it when the process
group's timeout is over; `shorten_timeout` makes that soon, once all ranks are under way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Group:
    """Some ranks: one process group, one for each dimension of a mesh, or this process alone."""

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup | None] = (),
        device: torch.device | None = None,
        *,
        rank: int = 0,
    ) -> None:
        self._groups = tuple(groups)
        self._device = device
        self.rank = rank
        self.ranks = math.prod(map(dist.get_world_size, self._groups))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the ranks, in float64, by one small collective."""
        if not self._groups:
            return list(values)
        vector = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        summed: list[float] = self._reduced(vector, dist.ReduceOp.SUM).tolist()
        return summed

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, as a new tensor if there are several."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest value over the ranks; it stays on the device."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def largest_number(self, number: float) -> float:
        """Return the largest of the ranks' numbers."""
        if not self._groups:
            return number
        return float(self.largest(torch.tensor(number, dtype=torch.float64, device=self._device)))

    def most_and_fewest(self, number: int) -> tuple[int, int]:
        """Return the largest and the smallest of the ranks' numbers, which are below 2**52."""
        if not self._groups:
            return number, number
        ends = torch.tensor([number, -number], dtype=torch.float64, device=self._device)
        most, fewest = self.largest(ends).tolist()
        return int(most), -int(fewest)

    def all_have(self, number: int) -> bool:
        """True if all ranks have the same number."""
        most, fewest = self.most_and_fewest(number)
        return most == fewest

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
                dist.broadcast(tensor, source, group=group)

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self._device is not None:  # a copy; a model may be on several devices of one kind
            is_there = tensor.device.type == self._device.type
            tensor = tensor.detach().to(tensor.device if is_there else self._device, copy=True)
        for group in self._groups:
            dist.all_reduce(tensor, op=operation, group=group)
        return tensor


def shorten_timeout(seconds: float) -> None:
    """Let collectives of the default process group fail after so many seconds of waiting.

    The first window may take long: ranks start, read data and compile at their own pace. From the
    second on, a wait that is many times a window's length means that a rank hangs. Call it on all
    ranks.
    """
    dist.barrier()
    # torch has no public function for it; torchtitan uses this one too.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), None)


def all_ranks() -> Group:
    """Return all ranks of the job; where there is no job, this process alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return Group()
    nccl = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    return Group([None], device, rank=dist.get_rank())


def world_size() -> int:
    return all_ranks().ranks


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, on the tensor's device."""
    return all_ranks().sum_tensor(tensor).to(tensor.device)


def of_all_ranks(value: T) -> list[T]:
    """Return what all ranks have, in their order; it is pickled on the way."""
    values: list[Any] = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def largest_over_ranks(value: float) -> float:
    """Return the largest over all ranks: decisions must be the same on all of them."""
    return all_ranks().largest_number(value)


def all_meet(name: str, seconds: float) -> bool:
    """True if all ranks come here within so many seconds; all of them get the same answer.

    It asks the job's store: a rank that never comes would leave the others in a collective.
    """
    if world_size() == 1:
        return True
    store, until = dist.distributed_c10d._get_default_store(), time.monotonic() + seconds
    decided = f"wholebatch/meet/{name}/decided"
    if int(store.add(f"wholebatch/meet/{name}", 1)) == world_size():
        store.compare_set(decided, "", "all")
    while not store.check([decided]) and time.monotonic() < until:
        time.sleep(1e-3)
    return bool(store.compare_set(decided, "", "some") == b"all")
