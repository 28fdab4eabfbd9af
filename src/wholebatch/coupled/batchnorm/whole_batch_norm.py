"""BatchNorms with other statistics than those of the batch they are given.

During a lock-step run, `WholeBatchNorms` lets them normalise with the moments of the whole batch:
all micro-batches meet there, forward and backward. `FixedNorms` lets them normalise with the
moments of an earlier batch, so that they couple no samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from wholebatch.coupled.batchnorm.moments import (
    InputGradient,
    Moments,
    Reduce,
    WholeMoments,
    backward_sums,
    layer_input,
    mean_over_samples,
    merge,
    moments,
    normalise,
    recomputing,
    samples_in,
    update_buffers,
    update_running,
)
from wholebatch.coupled.batchnorm.turn_taking_threads import TurnTakingThreads
from wholebatch.coupled.normalisation_layers import (
    ReplacedForwards,
    running_buffers,
    uses_batch_statistics,
)
from wholebatch.errors import UnsupportedError, WindowError

_PLAIN = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
"""Forwards that normalise, and do nothing else."""

_Move = Callable[[WholeMoments], None]
"""A function that moves a layer's running statistics towards the given moments."""
_Norm = Callable[[Tensor, Tensor | None, Tensor | None, float, _Move], Tensor]
"""A function that normalises: of the input, weight, bias, eps and the running statistics."""


class WholeBatchNorms:
    """A context in which the given layers normalise with the merged moments of all parties.

    Their `forward` is replaced on the instance, and restored on exit.
    """

    def __init__(
        self,
        norms: Sequence[tuple[str, nn.Module]],
        threads: TurnTakingThreads[Any],
        *,
        reduce: Reduce | None = None,
    ) -> None:
        self._norms = norms
        self._threads = threads
        self._reduce = reduce
        self._replaced = ReplacedForwards()
        self._open = False
        # The merged moments by party and layer. A checkpointed block that is recomputed in the
        # backward pass takes its moments from here, without a meeting.
        self._met: dict[tuple[int | None, str], list[WholeMoments]] = {}
        self.sizes: dict[str, int] = {}  # The first party's input bytes, by layer.

    def __enter__(self) -> WholeBatchNorms:
        self._open = True
        for name, module in self._norms:
            kind = self._batchnorm if isinstance(module, _BatchNorm) else self._instancenorm
            self._replaced.replace(module, kind(name, module, module.forward))
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        self._met.clear()
        self._replaced.restore()

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
                whole = self._threads.meet(
                    f"InstanceNorm {name!r}", mine, lambda p: mean_over_samples(p, self._reduce)
                )
                if self._first:
                    _fill(buffers, whole)
            return out

        return forward

    @property
    def _first(self) -> bool:
        """True if this thread belongs to the first party."""
        return self._threads.party == 0

    def _moments(self, name: str, x: Tensor, running: _Move) -> WholeMoments:
        """Return the whole batch's moments; the last party to bring its own calls `running`."""
        met = self._met.setdefault((self._threads.party, name), [])
        if recomputing():
            return met[0] if len(met) == 1 else self._earlier(name, moments(x), met)
        if self._first:
            self.sizes[name] = self.sizes.get(name, 0) + x.numel() * x.element_size()

        def merged(parts: list[Moments]) -> WholeMoments:
            whole = merge(parts, self._reduce)
            if isinstance(whole.count, int) and whole.count < 2:
                raise ValueError(
                    f"BatchNorm {name!r}: the whole batch has one value per channel, and "
                    "training needs more than one"
                )
            running(whole)
            return whole

        met.append(self._threads.meet(f"BatchNorm {name!r}", moments(x), merged))
        return met[-1]

    def _earlier(self, name: str, mine: Moments, met: list[WholeMoments]) -> WholeMoments:
        """Return the merged moments of the recomputed call, found by this party's own mean."""
        if not met:
            raise UnsupportedError(
                f"BatchNorm {name!r} was called in the backward pass and never before, in the "
                "forward: exact BatchNorm does not know its statistics"
            )
        party, mark = self._threads.party or 0, mine.mean.sum()
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
            if self._reduce is not None:
                whole = self._reduce(whole)
            return make(whole / count), own

        made, sums = self._threads.meet(f"the backward of BatchNorm {name!r}", mine, total)
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


class FixedNorms:
    """A context in which `norms` normalise every batch with the moments of their first one.

    This is training without samples that act on each other through a BatchNorm, so that other
    coupling can be told from it. Call `begin()` before another run of the model. Running statistics
    stay.
    """

    def __init__(self, norms: Sequence[tuple[str, nn.Module]]) -> None:
        self._norms = norms
        self._first: dict[str, list[WholeMoments]] = {}
        self._calls: dict[str, int] = {}
        self._replaced = ReplacedForwards()

    def __enter__(self) -> FixedNorms:
        for name, module in self._norms:
            self._replaced.replace(module, self._fixed(name, module, module.forward))
        return self

    def __exit__(self, *error: object) -> None:
        self._replaced.restore()

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
