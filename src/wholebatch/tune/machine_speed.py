"""The measured speed of this machine: matrix products, copies, all-reduces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wholebatch.core.loss import Loss, as_loss
from wholebatch.core.precision import choose as choose_precision
from wholebatch.tune.time_split import Clock

__all__ = ["best_flops", "copy_bandwidth", "flops_of", "reduce_bandwidth"]

_WIDTH = {"cpu": 1024, "cuda": 8192}
_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def best_flops(device: torch.device, precision: str, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large square matrix product here."""
    kind = _DTYPE.get(precision, dtype)
    width = _WIDTH.get(device.type, 1024)
    one = torch.randn(width, width, device=device).to(kind)
    clock = Clock(device)
    taken = []
    torch.mm(one, one)
    for _ in range(5):
        began = clock.now()
        torch.mm(one, one)
        taken.append(clock.between(began, clock.now()))
    return 2.0 * width**3 / min(taken)


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes, beyond any cache."""
    numbers = 2**26 if device.type == "cuda" else 2**24
    source, target = (torch.zeros(numbers, device=device) for _ in range(2))
    clock = Clock(device)
    taken = []
    target.copy_(source)
    for _ in range(3):
        began = clock.now()
        target.copy_(source)
        taken.append(clock.between(began, clock.now()))
    return 2.0 * source.nbytes / min(taken)


def flops_of(
    model: nn.Module, loss: Callable[[Any, Any], Any], micro: Any, *, precision: str
) -> int | None:
    """Count the floating-point operations of one forward and backward; None if none were seen."""
    from torch.utils.flop_counter import FlopCounterMode

    casts = choose_precision(precision, next(model.parameters()).device.type)
    with FlopCounterMode(display=False) as counter:
        with casts.forward():
            result = as_loss(loss(model, micro))
        totals = (
            [result.total]
            if isinstance(result, Loss)
            else [term.total for term in result.by_name.values()]
        )
        torch.autograd.backward(totals)
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops() or None


def reduce_bandwidth(device: torch.device, numbers: int) -> float | None:
    """Return the bytes per second of an all-reduce of this many numbers; None on one rank.

    It follows the model in `ranks`: a ring moves 2 (n − 1) / n of the bytes.
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    ranks = dist.get_world_size()
    sums = torch.zeros(numbers, device=device)
    clock = Clock(device)
    dist.all_reduce(sums)
    taken = []
    for _ in range(3):
        began = clock.now()
        dist.all_reduce(sums)
        taken.append(clock.between(began, clock.now()))
    slowest = torch.tensor(min(taken), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return 2 * (ranks - 1) / ranks * sums.nbytes / float(slowest)
