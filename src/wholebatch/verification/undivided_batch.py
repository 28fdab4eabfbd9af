"""The undivided batch by plain torch: forward, backward, clip, step. No engine in it.

Under data-parallel ranks the batch is the global one: every rank runs its own part undivided, and
the gradients of the sums are added over the ranks and divided by the units of all.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.close import ClipNorm
from wholebatch.core.loss import Loss, as_loss
from wholebatch.core.splitting import to_device

__all__ = [
    "Numbers",
    "Objective",
    "add_over_ranks",
    "any_rank",
    "apart",
    "clip",
    "largest",
    "objective",
    "over_ranks",
    "ranks",
    "sharded",
]


AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Numbers:
    """In which numbers a run computes: the precision, and the loss scale that fp16 needs."""

    precision: str = "full"
    loss_scale: float = 1.0

    def unit(self, model: nn.Module) -> float:
        """The relative error of one rounding in the coarsest format that takes part."""
        formats = [p.dtype.to_real() for p in model.parameters()]
        if self.precision in AUTOCAST:
            formats.append(AUTOCAST[self.precision])
        unit = max(torch.finfo(dtype).eps / 2 for dtype in formats)
        return max(unit, _TF32) if torch.float32 in formats and _uses_tf32(model) else unit

    def forward(self, device: torch.device) -> Any:
        """The context of the forward."""
        if self.precision not in AUTOCAST:
            return nullcontext()
        return torch.autocast(device.type, dtype=AUTOCAST[self.precision])


_TF32 = 2.0**-11
"""One rounding to TensorFloat-32, which CUDA devices may multiply float32 in."""


def _uses_tf32(model: nn.Module) -> bool:
    """Whether products of this model may be made in TensorFloat-32, by torch's settings now."""
    if next(model.parameters()).device.type != "cuda":
        return False
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is moving these settings to other names
        try:
            return bool(
                torch.backends.cuda.matmul.allow_tf32
                or (convolves and torch.backends.cudnn.allow_tf32)
            )
        except RuntimeError:  # old and new names were mixed: one of them was set
            return True


@dataclass(frozen=True)
class Objective:
    """The sums of one batch, the units of each, and the weight of its mean."""

    totals: tuple[Tensor, ...]
    units: tuple[float, ...]
    weights: tuple[float, ...]

    def mean(self, units: Sequence[float] | None = None) -> Tensor:
        """Sum over terms of weight × total / units, with `units` for its own if given."""
        over = self.units if units is None else units
        parts = [
            total * (weight / count if count else 0.0)
            for total, count, weight in zip(self.totals, over, self.weights, strict=True)
        ]
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def objective(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, numbers: Numbers
) -> Objective:
    """One forward of the batch as it is."""
    device = next(model.parameters()).device
    with numbers.forward(device):
        result = as_loss(loss(model, to_device(batch, device)))
    if isinstance(result, Loss):
        return Objective((_wide(result.total),), (float(result.units),), (1.0,))
    terms = result.by_name.values()
    return Objective(
        tuple(_wide(term.total) for term in terms),
        tuple(float(term.units) for term in terms),
        tuple(term.weight for term in terms),
    )


def _wide(total: Tensor) -> Tensor:
    """16-bit sums are divided in float32: their mean is not what is to be judged."""
    return total.float() if total.dtype in (torch.bfloat16, torch.float16) else total


def ranks() -> int:
    """How many processes train together here."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def sharded(model: nn.Module) -> bool:
    """Whether the parameters are shards, whose backward reduces them whatever one does."""
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


@torch.no_grad()
def add_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Each tensor becomes its sum over the ranks, in place."""
    if ranks() > 1:
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)


@torch.no_grad()
def clip(optimizer: torch.optim.Optimizer, clip_norm: ClipNorm, clip_value: float | None) -> None:
    """Clip the gradients as torch's own functions do."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    together = [parameter for group in groups for parameter in group]
    if clip_value is not None:
        nn.utils.clip_grad_value_(together, clip_value)
    if clip_norm is None:
        return
    limits = clip_norm if isinstance(clip_norm, Sequence) else [clip_norm]
    for group, limit in zip(
        groups if isinstance(clip_norm, Sequence) else [together], limits, strict=True
    ):
        if limit is not None:
            norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
            # The norm of shards is a partial one, to which torch would add its 1e-6 on each rank.
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            nn.utils.clip_grads_with_norm_(group, limit, norm)


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
