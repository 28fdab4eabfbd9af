"""The processes that share a window, as far as counts and sums are concerned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wholebatch.distributed.process_group import Group

__all__ = ["Ranks", "ranks_of"]


class Ranks(Protocol):
    """The data-parallel ranks, as far as counts are concerned."""

    size: int
    rank: int

    def sum(self, values: Sequence[float]) -> list[float]: ...
    def sum_tensor(self, tensor: Tensor) -> Tensor: ...
    def largest(self, value: Tensor) -> Tensor: ...


class _OneProcess:
    size = 1
    rank = 0

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def largest(self, value: Tensor) -> Tensor:
        return value


def ranks_of(device: torch.device) -> Ranks:
    """Return all processes of torch.distributed, or this one alone where it is not in use."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return _OneProcess()
    return Group([None], device, rank=dist.get_rank())
