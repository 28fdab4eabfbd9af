"""BatchNorms with other statistics than those of the batch they are given.

During a lock-step run, `WholeBatchNorms` lets them normalise with the moments of the whole batch:
all micro-batches meet there, forward and backward. `FixedNorms` lets them normalise with the
moments of an earlier batch, so that they couple no samples.

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
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from wholebatch.coupled.batchnorm.turn_taking_threads import TurnTakingThreads
from wholebatch.coupled.normalisation_layers import (
    replace_forward,
    running_buffers,
    uses_batch_statistics,
)
from wholebatch.errors import UnsupportedError, WindowError

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


_PLAIN = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
"""Forwards that normalise, and do nothing else."""

_Move = Callable[[WholeMoments], None]
"""A function that moves a layer's running statistics towards the given moments."""
_Norm = Callable[[Tensor, Tensor | None, Tensor | None, float, _Move], Tensor]
"""A function that normalises: of the input, weight, bias, eps and the running statistics."""


@dataclass(eq=False)
class WholeBatchNorms:
    """A context in which the given layers normalise with the merged moments of all parties.

    Their `forward` is replaced on the instance, and restored on exit.
    """

    norms: Sequence[tuple[str, nn.Module]]
    threads: TurnTakingThreads[Any]
    reduce: Reduce | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    """The first party's input bytes, by layer."""
    _met: dict[tuple[int | None, str], list[WholeMoments]] = field(default_factory=dict)
    """The merged moments by party and layer. A checkpointed block that is recomputed in the
    backward pass takes its moments from here, without a meeting."""
    _replaced: ExitStack = field(default_factory=ExitStack)
    _open: bool = False

    def __enter__(self) -> WholeBatchNorms:
        self._open = True
        for name, module in self.norms:
            kind = self._batchnorm if isinstance(module, _BatchNorm) else self._instancenorm
            replace_forward(self._replaced, module, kind(name, module, module.forward))
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        self._met.clear()
        self._replaced.close()

    def _batchnorm(
        self, name: str, module: nn.Module, found: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        def norm(
            x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, running: _Move
        ) -> Tensor:
            whole = self._moments(name, x.detach(), running)
            return _normalise(x, weight, bias, whole, eps, self, name)

        plain = _plain_forward(module, found, norm)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if not uses_batch_statistics(module):
                return found(*args, **kwargs)
            if plain is not None:
                return plain(*args, **kwargs)
            counted = recomputing() or not self._first
            with _InsideNorm(norm, module if counted else None) as inside:
                out = found(*args, **kwargs)
            if not inside.calls:
                raise UnsupportedError(
                    f"{name!r} ({type(module).__name__}) is a BatchNorm that does not call "
                    "F.batch_norm, so it cannot be made exact: use a plain BatchNorm, or name "
                    'another policy (batchnorm="statistics")'
                )
            return out

        return forward

    def _instancenorm(
        self, name: str, module: nn.Module, found: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            buffers = [b for b in running_buffers(module).values() if b.is_floating_point()]
            if not module.training or not buffers:
                return found(*args, **kwargs)
            # The running statistics move towards the mean over samples. That equals the mean of the
            # statistics after each micro-batch alone, weighted by samples.
            before = [buffer.detach().clone() for buffer in buffers]
            try:
                out = found(*args, **kwargs)
                after = [buffer.detach().clone() for buffer in buffers]
            finally:
                _fill(buffers, before)
            if not recomputing():
                mine = Moments(samples_in(module, layer_input(args, kwargs)), *after)
                whole = self.threads.meet(
                    f"InstanceNorm {name!r}", mine, lambda p: mean_over_samples(p, self.reduce)
                )
                if self._first:
                    _fill(buffers, whole)
            return out

        return forward

    @property
    def _first(self) -> bool:
        """True if this thread belongs to the first party."""
        return self.threads.party == 0

    def _moments(self, name: str, x: Tensor, running: _Move) -> WholeMoments:
        """Return the whole batch's moments; the last party to bring its own calls `running`."""
        met = self._met.setdefault((self.threads.party, name), [])
        if recomputing():
            return met[0] if len(met) == 1 else self._earlier(name, moments(x), met)
        if self._first:
            self.sizes[name] = self.sizes.get(name, 0) + x.numel() * x.element_size()

        def merged(parts: list[Moments]) -> WholeMoments:
            whole = merge(parts, self.reduce)
            if isinstance(whole.count, int) and whole.count < 2:
                raise ValueError(
                    f"BatchNorm {name!r}: the whole batch has one value per channel, and "
                    "training needs more than one"
                )
            running(whole)
            return whole

        met.append(self.threads.meet(f"BatchNorm {name!r}", moments(x), merged))
        return met[-1]

    def _earlier(self, name: str, mine: Moments, met: list[WholeMoments]) -> WholeMoments:
        """Return the merged moments of the recomputed call, found by this party's own mean."""
        if not met:
            raise UnsupportedError(
                f"BatchNorm {name!r} was called in the backward pass and never before, in the "
                "forward: exact BatchNorm does not know its statistics"
            )
        party, mark = self.threads.party or 0, mine.mean.sum()
        gaps = torch.stack([(then.mean_sums[party] - mark).abs() for then in met])
        return met[int(gaps.argmin())]

    def input_gradient(
        self,
        name: str,
        mine: tuple[Tensor, Tensor],
        make: Callable[[Tensor], InputGradient],
        count: int | Tensor,
    ) -> tuple[InputGradient, Tensor | None]:
        """Return `make(means)`, where `means` are the whole batch's backward sums over its count.

        The first party also gets the sums over this rank's parties, to add them once.
        """
        if not self._open:
            raise WindowError(
                f"backward through BatchNorm {name!r} outside of the run that its forward was in: "
                "call backward inside it"
            )

        def total(parts: list[tuple[Tensor, Tensor]]) -> tuple[InputGradient, Tensor]:
            whole = torch.stack([each for part in parts for each in part])
            own = whole = whole.view(len(parts), 2, -1).sum(0)
            if self.reduce is not None:
                whole = self.reduce(whole)
            return make(whole / count), own

        made, sums = self.threads.meet(f"the backward of BatchNorm {name!r}", mine, total)
        return made, sums if self._first else None


class _Normalise(torch.autograd.Function):
    """`y = w (x - mean) · invstd + b` with the moments of the whole batch, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        whole: WholeMoments,
        eps: float,
        norms: WholeBatchNorms,
        name: str,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.whole, ctx.eps, ctx.norms, ctx.name = whole, eps, norms, name
        ctx.bias_dtype = None if bias is None else bias.dtype
        return normalise(x, weight, bias, whole, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"BatchNorm {ctx.name!r}: a second derivative (create_graph=True) through an exact "
                "BatchNorm is not possible"
            )
        x, weight = ctx.saved_tensors
        whole, eps = ctx.whole, ctx.eps
        sums: Any = backward_sums(dy, x, whole, eps)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            shared, sums = ctx.norms.input_gradient(
                ctx.name,
                sums,
                lambda means: InputGradient(weight, whole, means, eps, x.dim()),
                whole.count,
            )
            dx = shared.of(dy, x)
        if sums is not None and ctx.needs_input_grad[1]:
            dweight = (sums[1] * whole.invstd(eps)).to(weight.dtype)
        if sums is not None and ctx.needs_input_grad[2]:
            dbias = sums[0].to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None, None, None


_normalise: Callable[..., Tensor] = _Normalise.apply


@dataclass(eq=False)
class FixedNorms:
    """A context in which `norms` normalise every batch with the moments of their first one.

    This is training without samples that act on each other through a BatchNorm, so that other
    coupling can be told from it. Call `begin()` before another run of the model. Running statistics
    stay.
    """

    norms: Sequence[tuple[str, nn.Module]]
    _first: dict[str, list[WholeMoments]] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)
    _replaced: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> FixedNorms:
        for name, module in self.norms:
            replace_forward(self._replaced, module, self._fixed(name, module, module.forward))
        return self

    def __exit__(self, *error: object) -> None:
        self._replaced.close()

    def begin(self) -> None:
        """Begin another run of the model."""
        self._calls.clear()

    def _fixed(self, name: str, module: nn.Module, found: Callable[..., Any]) -> Callable[..., Any]:
        def norm(x: Tensor, weight: Any, bias: Any, eps: float, running: _Move) -> Tensor:
            call = self._calls[name] = self._calls.get(name, -1) + 1
            first = self._first.setdefault(name, [])
            if call >= len(first):
                first.append(merge([moments(x.detach())]))
            return normalise(x, weight, bias, first[min(call, len(first) - 1)], eps)

        def inside(*args: Any, **kwargs: Any) -> Any:
            with _InsideNorm(norm):
                return found(*args, **kwargs)

        return _plain_forward(module, found, norm) or inside


def _plain_forward(
    module: nn.Module, found: Callable[..., Any], norm: _Norm
) -> Callable[..., Tensor] | None:
    """Return a forward that does `norm` alone, or None if the layer's own does anything else."""
    if type(module).forward not in _PLAIN or getattr(found, "__func__", None) not in _PLAIN:
        return None
    assert isinstance(module, _BatchNorm)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        x = layer_input(args, kwargs)
        module._check_input_dim(x)
        return norm(x, module.weight, module.bias, module.eps, partial(update_running, module))

    return forward


class _InsideNorm(TorchFunctionMode):
    """A context that calls `norm` where a layer with a forward of its own calls F.batch_norm.

    Calls that use the running statistics stay as they are. The layer's forward counts the batch
    itself, and may derive its momentum from the count. `counted` is the layer if this window is
    counted already: then its count is lowered first, and restored once it has counted again.
    """

    def __init__(self, norm: _Norm, counted: nn.Module | None = None) -> None:
        super().__init__()
        self.calls = 0
        self._norm = norm
        self._tracked = None
        if counted is not None:
            self._tracked = running_buffers(counted).get("num_batches_tracked")
        if self._tracked is not None:
            self._count = self._tracked.detach().clone()
            self._tracked.sub_(1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
        self.calls += 1
        if self._tracked is not None:
            self._tracked.copy_(self._count)
        return self._norm(
            input,
            weight,
            bias,
            eps,
            lambda whole: update_buffers(running_mean, running_var, momentum, whole),
        )


@torch.no_grad()
def _fill(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)
