"""The mathematics of BatchNorm over a batch in parts.

Forward: every part has a count, mean and variance. `merge` computes mean and M2 (the sum of squared
distances from the mean) of the whole batch by Chan's formula, for K parts at once:

    mean = Σ n_k mean_k / N            M2 = Σ n_k var_k + Σ n_k (mean_k - mean)²

No large numbers are subtracted, so a mean far from zero loses no precision.

Backward: with x̂ = (x - mean) · invstd, y = w x̂ + b and the whole batch's sums S1 = Σ dy and
S2 = Σ dy (x - mean),

    dx = w · invstd · (dy - S1/N - (x - mean) · invstd² · S2/N)

Only S1 and S2 are shared between parts. The gradients of w and b are plain sums over samples: each
part adds its own. Everything is at least float32, and float64 for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

Reduce = Callable[[Tensor], Tensor]
"""A function that sums a tensor over the data-parallel ranks, called in the same order on all."""


@dataclass(frozen=True, slots=True)
class Moments:
    """The count, mean and (biased) variance per channel of one part of a batch."""

    count: int
    mean: Tensor
    var: Tensor


@dataclass(eq=False)
class WholeMoments:
    """The count, mean and variance per channel of the whole batch, with cached derived values."""

    count: int | Tensor
    mean: Tensor
    var: Tensor
    """The biased variance, with which the batch is normalised."""
    means: Tensor
    _invstd: dict[float, Tensor] = field(default_factory=dict)

    @cached_property
    def mean_sums(self) -> Tensor:
        """The sum of each part's mean, to tell several calls of a layer apart."""
        return self.means.sum(1)

    @cached_property
    def one(self) -> Tensor:
        return torch.ones(1, dtype=torch.int32, device=self.mean.device)

    def invstd(self, eps: float) -> Tensor:
        if eps not in self._invstd:
            self._invstd[eps] = torch.rsqrt(self.var + eps)
        return self._invstd[eps]


def moments(x: Tensor) -> Moments:
    """Return the count, mean and variance of every channel (dimension 1) of `x`."""
    kind = x.device.type
    # The CUDA kernel accumulates 16-bit input in float32 itself: x needs no copy.
    wide = x if kind == "cuda" or x.dtype in (torch.float32, torch.float64) else x.float()
    if kind in ("cuda", "cpu"):
        mean, var = torch.batch_norm_update_stats(wide, None, None, 0.0)
    else:
        dims = [d for d in range(x.dim()) if d != 1]
        var, mean = torch.var_mean(wide, dims, correction=0)
    return Moments(x.numel() // x.shape[1], mean, var)


def merge(parts: Sequence[Moments], reduce: Reduce | None = None) -> WholeMoments:
    """Return the moments of all parts together, with `reduce` over all ranks."""
    both = torch.stack([each for part in parts for each in (part.mean, part.var)])
    means, variances = both.view(len(parts), 2, -1).unbind(1)
    counts = tuple(part.count for part in parts)
    count: int | Tensor = sum(counts)
    even = len(set(counts)) == 1
    if even and reduce is None:  # The common case, once per layer: use few kernels.
        between, mean = torch.var_mean(means, 0, correction=0)
        return WholeMoments(count, mean, variances.mean(0).add_(between), means)
    weights: float | Tensor = float(counts[0])
    if not even:  # Filled in on the device: a copy from the host would block.
        weights = torch.cat([means.new_full((1, 1), float(one)) for one in counts])
    sums = (means * weights).sum(0)
    if reduce is not None:
        of_all = reduce(torch.cat([sums, sums.new_full((1,), float(count))]))
        sums, count = of_all[:-1], of_all[-1]
    mean = sums / count
    m2 = ((variances + (means - mean).square_()) * weights).sum(0)
    return WholeMoments(count, mean, (m2 if reduce is None else reduce(m2)) / count, means)


def mean_over_samples(
    parts: Sequence[Moments], reduce: Reduce | None = None
) -> tuple[Tensor, Tensor]:
    """Return the averages of mean and variance, weighted by counts: those of an InstanceNorm."""
    total: int | Tensor = sum(part.count for part in parts)
    means = torch.stack([part.mean * part.count for part in parts]).sum(0)
    variances = torch.stack([part.var * part.count for part in parts]).sum(0)
    if reduce is not None:
        means, variances = reduce(means), reduce(variances)
        total = reduce(means.new_full((), float(total)))
    return means / total, variances / total


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, whole: WholeMoments, eps: float
) -> Tensor:
    """Normalise `x` with the whole batch's moments, in the dtype and memory format of `x`."""
    wide = _like(weight, whole), _like(bias, whole)
    if x.device.type == "cuda" and not torch.is_grad_enabled():  # it has no derivative
        return torch.batch_norm_elemt(x, *wide, whole.mean, whole.invstd(eps), eps)
    # In evaluation mode the native kernel normalises with the given moments.
    return torch.batch_norm(
        x, *wide, whole.mean, whole.var, False, 0.0, eps, torch.backends.cudnn.enabled
    )


def backward_sums(dy: Tensor, x: Tensor, whole: WholeMoments, eps: float) -> tuple[Tensor, Tensor]:
    """Return S1 = Σ dy and S2 = Σ dy (x - mean) of one part."""
    if x.device.type == "cuda":
        s1, s2, _, _ = torch.batch_norm_backward_reduce(
            _dense(dy), x, whole.mean, whole.invstd(eps), None, True, False, False
        )
        return s1, s2
    # As the backward of an evaluation-mode BatchNorm, this kernel returns S1 and S2 · invstd.
    _, s2_invstd, s1 = torch.ops.aten.native_batch_norm_backward.default(
        dy, x, None, whole.mean, whole.var, None, None, False, eps, [False, True, True]
    )
    return s1, s2_invstd / whole.invstd(eps)


class InputGradient:
    """The input gradient dx of every part, from S1/N and S2/N; shared factors are computed once."""

    def __init__(
        self, weight: Tensor | None, whole: WholeMoments, means: Tensor, eps: float, dimensions: int
    ) -> None:
        self._whole = whole
        self._s1, self._s2 = means.unbind()
        self._invstd = invstd = whole.invstd(eps)
        self._weight = wide = _like(weight, whole)
        if means.device.type != "cuda":
            shape = (1, -1) + (1,) * (dimensions - 2)
            slope = invstd if wide is None else wide * invstd
            self._mean = whole.mean.view(shape)
            self._of_x = (-slope * invstd.square() * self._s2).view(shape)
            self._of_dy = slope.view(shape)
            self._of_one = (slope * self._s1).view(shape)

    def of(self, dy: Tensor, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            # The sums are already divided, so let the kernel divide by one.
            whole = self._whole
            return torch.batch_norm_backward_elemt(
                _dense(dy), x, whole.mean, self._invstd, self._weight, self._s1, self._s2, whole.one
            )
        dx = (x - self._mean).mul_(self._of_x)
        dx.addcmul_(dy.to(dx.dtype), self._of_dy)
        dx.sub_(self._of_one)
        return dx.to(x.dtype)


def _like(parameter: Tensor | None, whole: WholeMoments) -> Tensor | None:
    return None if parameter is None else parameter.to(whole.mean.dtype)


def _dense(dy: Tensor) -> Tensor:
    # The CUDA kernels read raw memory: an expanded gradient (of a sum) must be materialised.
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    if dy.dim() in layouts and dy.is_contiguous(memory_format=layouts[dy.dim()]):
        return dy
    return dy.contiguous()


def update_running(module: _BatchNorm, whole: WholeMoments) -> None:
    """Update a layer's running statistics as one training-mode forward of the whole batch does."""
    if not (module.training and module.track_running_stats):
        return
    factor: float | Tensor = 0.0 if module.momentum is None else module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:  # Stay on the device, to avoid a synchronisation.
            factor = module.num_batches_tracked.double().reciprocal()
    update_buffers(module.running_mean, module.running_var, factor, whole)


def update_buffers(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    factor: float | Tensor,
    whole: WholeMoments,
) -> None:
    """Set running = (1 - factor) · running + factor · (the whole batch's), in the wider dtype."""
    unbiased = whole.var * (whole.count / (whole.count - 1))
    for buffer, value in ((running_mean, whole.mean), (running_var, unbiased)):
        if buffer is None:
            continue
        if isinstance(factor, float) and buffer.dtype == value.dtype:
            buffer.lerp_(value, factor)
        else:
            buffer.copy_(buffer * (1.0 - factor) + value * factor)


def recomputing() -> bool:
    """True if a backward runs on this thread: a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def layer_input(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor that a normalisation layer was called with, by position or by name."""
    given: Tensor = args[0] if args else next(iter(kwargs.values()))
    return given


def samples_in(module: nn.Module, x: Tensor) -> int:
    """Return the number of samples of an InstanceNorm's input: 1 without a batch dimension."""
    assert isinstance(module, _InstanceNorm)
    return 1 if x.dim() == module._get_no_batch_dim() else x.shape[0]
