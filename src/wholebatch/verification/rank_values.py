"""Numbers that the ranks must agree on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wholebatch.verification.undivided_batch import ranks

__all__ = ["any_rank", "apart", "largest", "over_ranks"]


def apart(ours: Tensor, reference: Tensor) -> float:
    size = float(reference.norm())
    far = float((ours - reference).norm())
    if size > 0:
        return far / size
    return 0.0 if far == 0 else math.inf


def _device_of_collectives() -> torch.device:
    nccl = torch.distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def over_ranks(tensor: Tensor) -> Tensor:
    if ranks() == 1:
        return tensor
    there = tensor.to(_device_of_collectives(), copy=True)
    torch.distributed.all_reduce(there)
    return there.to(tensor.device)


def largest(value: float) -> float:
    """The largest over the ranks: a hypothesis fits only if it fits on every one."""
    if ranks() == 1:
        return value
    there = torch.tensor(min(value, 1e30), dtype=torch.float64, device=_device_of_collectives())
    torch.distributed.all_reduce(there, op=torch.distributed.ReduceOp.MAX)
    found = float(there)
    return math.inf if found >= 1e30 else found


def any_rank(value: bool) -> bool:
    return largest(float(value)) > 0
