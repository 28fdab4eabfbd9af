"""The undivided batch by plain torch: forward, backward, clip, step. No engine in it.

Under data-parallel ranks the batch is the global one: every rank runs its own part undivided, and
the gradients of the sums are added over the ranks and divided by the units of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.close import ClipNorm
from wholebatch.core.loss import as_loss, terms_of, wide
from wholebatch.core.precision import Precision, choose
from wholebatch.core.splitting import to_device

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

_TF32 = 2.0**-11
"""The error of one rounding to TensorFloat-32, which CUDA devices may multiply float32 in."""


@dataclass(frozen=True)
class Numbers:
    """The number formats of a run: its precision, and the loss scale that fp16 needs."""

    precision: str = "full"
    loss_scale: float = 1.0

    def unit(self, model: nn.Module) -> float:
        """Return the relative error of one rounding in the coarsest format that takes part."""
        formats = [p.dtype.to_real() for p in model.parameters()]
        if self.precision != "full":
            formats.append(AUTOCAST.get(self.precision, torch.bfloat16))
        unit = max(torch.finfo(dtype).eps / 2 for dtype in formats)
        return max(unit, _TF32) if torch.float32 in formats and _uses_tf32(model) else unit

    def forward(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._chosen(model).forward()

    def window(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of a forward and its backward, which checkpointing computes in."""
        return self._chosen(model).window()

    def _chosen(self, model: nn.Module) -> Precision:
        return choose(self.precision, next(model.parameters()).device.type, models=[model])


def _uses_tf32(model: nn.Module) -> bool:
    """Tell if torch's settings allow TensorFloat-32 in products of this model."""
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
        """Return the sum of weight × total / units over the terms; `units` replaces their own."""
        over = self.units if units is None else units
        parts = [
            total * (weight / count if count else 0.0)
            for total, count, weight in zip(self.totals, over, self.weights, strict=True)
        ]
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def weighted_total(self) -> Tensor:
        """Return the sum of weight × total over the terms, not divided."""
        parts = [total * weight for total, weight in zip(self.totals, self.weights, strict=True)]
        return sum(parts, start=parts[0].new_zeros(()))


def objective(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, numbers: Numbers
) -> Objective:
    """Run one forward of the batch as it is."""
    device = next(model.parameters()).device
    with numbers.forward(model):
        result = as_loss(loss(model, to_device(batch, device)))
    terms = terms_of(result).values()
    return Objective(
        tuple(wide(term.total) for term in terms),  # its division adds no rounding of its own
        tuple(float(term.units) for term in terms),
        tuple(term.weight for term in terms),
    )


@torch.no_grad()
def clip(optimizer: torch.optim.Optimizer, clip_norm: ClipNorm, clip_value: float | None) -> None:
    """Clip the gradients with torch's own functions."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    together = [parameter for group in groups for parameter in group]
    if clip_value is not None:
        nn.utils.clip_grad_value_(together, clip_value)
    if clip_norm is None:
        return
    by_group = isinstance(clip_norm, Sequence)
    limits = clip_norm if isinstance(clip_norm, Sequence) else [clip_norm]
    for group, limit in zip(groups if by_group else [together], limits, strict=True):
        if limit is not None:
            norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
            # The norm of shards is a partial one, to which torch would add its 1e-6 on each rank.
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            nn.utils.clip_grads_with_norm_(group, limit, norm)


def sharded(model: nn.Module) -> bool:
    """Tell if the parameters are shards, whose backward always reduces them."""
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())
