"""BatchNorms that meet: during a run, they normalise with the moments of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wholebatch.coupled.batchnorm.fixed_norms import PLAIN, InsideNorm, given_to
from wholebatch.coupled.batchnorm.moments import (
    InputGradient,
    Merged,
    Moments,
    Reduce,
    backward_sums,
    merge,
    moments,
    move,
    move_buffers,
    normalise,
    recomputing,
)
from wholebatch.coupled.batchnorm.running_statistics import instances
from wholebatch.coupled.batchnorm.turn_taking_threads import Baton
from wholebatch.coupled.normalisation_layers import running_buffers, uses_batch_statistics
from wholebatch.coupled.replaced_forwards import ReplacedForwards
from wholebatch.errors import UnsupportedError, WindowError

__all__ = ["Meetings"]


class Meetings:
    """A context in which the given layers normalise with the merged moments of all parties.

    Their `forward` is replaced on the instance, and restored on exit.
    """

    def __init__(
        self,
        norms: Sequence[tuple[str, nn.Module]],
        baton: Baton[Any],
        *,
        reduce: Reduce | None = None,
    ) -> None:
        self._norms = norms
        self._baton = baton
        self._reduce = reduce
        self._replaced = ReplacedForwards()
        self._open = False
        # The merged moments by party and layer. A checkpointed block that is recomputed in the
        # backward pass takes its moments from here, without a meeting.
        self._met: dict[tuple[int | None, str], list[Merged]] = {}
        self.sizes: dict[str, int] = {}  # The first party's input bytes, by layer.

    def __enter__(self) -> Meetings:
        self._open = True
        for name, module in self._norms:
            kind = _batchnorm if isinstance(module, _BatchNorm) else _instancenorm
            self._replaced.replace(module, kind(self, name, module, module.forward))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        self._met.clear()
        self._replaced.restore()

    def norm(
        self,
        name: str,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        running: Callable[[Merged], None],
    ) -> Tensor:
        """Normalise `x` with the whole batch's moments; call `running` with them once."""
        whole = self._moments(name, x.detach(), running)
        return _normalise(x, weight, bias, whole, eps, self, name)

    def _moments(self, name: str, x: Tensor, running: Callable[[Merged], None]) -> Merged:
        met = self._met.setdefault((self._baton.party, name), [])
        if recomputing():
            return met[0] if len(met) == 1 else self._same(name, moments(x), met)
        if self.first:
            self.sizes[name] = self.sizes.get(name, 0) + x.numel() * x.element_size()
        whole = self._baton.meet(
            f"BatchNorm {name!r}", moments(x), lambda parts: self._merge(name, parts, running)
        )
        met.append(whole)
        return whole

    def _merge(
        self, name: str, parts: Sequence[Moments], running: Callable[[Merged], None]
    ) -> Merged:
        whole = merge(parts, self._reduce)
        if isinstance(whole.count, int) and whole.count < 2:
            raise ValueError(
                f"BatchNorm {name!r}: the whole batch has one value per channel, and "
                "training needs more than one"
            )
        running(whole)
        return whole

    def _same(self, name: str, mine: Moments, met: list[Merged]) -> Merged:
        """Return the merged moments of the recomputed call, found by this party's own mean."""
        if not met:
            raise UnsupportedError(
                f"BatchNorm {name!r} was called in the backward pass and never before, in the "
                "forward: exact BatchNorm does not know its statistics"
            )
        mark = mine.mean.sum()
        gaps = torch.stack([(then.marks[self._baton.party or 0] - mark).abs() for then in met])
        return met[int(gaps.argmin())]

    def input_gradient(
        self,
        name: str,
        mine: tuple[Tensor, Tensor],
        make: Callable[[Tensor], InputGradient],
        count: int | Tensor,
    ) -> tuple[InputGradient, _OfAll]:
        """Return `make(means)`, where `means` are the whole batch's backward sums over its count.

        Also return the sums over this rank's parties, which only the first taker gets.
        """
        if not self._open:
            raise WindowError(
                f"backward through BatchNorm {name!r} outside of the run that its forward was in: "
                "call backward inside it"
            )

        def total(parts: list[tuple[Tensor, Tensor]]) -> tuple[InputGradient, _OfAll]:
            whole = torch.stack([each for part in parts for each in part])
            own = whole = whole.view(len(parts), 2, -1).sum(0)
            if self._reduce is not None:
                whole = self._reduce(whole)
            return make(whole / count), _OfAll(own)

        return self._baton.meet(f"the backward of BatchNorm {name!r}", mine, total)

    def weighted(self, name: str, count: int, values: list[Tensor]) -> list[Tensor]:
        """Return the means of `values` over the samples of all parties."""

        def mean(parts: list[tuple[int, list[Tensor]]]) -> list[Tensor]:
            total: int | Tensor = sum(n for n, _ in parts)
            sums = [torch.stack([v[i] * n for n, v in parts]).sum(0) for i in range(len(values))]
            if self._reduce is not None:
                sums = [self._reduce(each) for each in sums]
                total = self._reduce(values[0].new_full((), float(total)))
            return [each / total for each in sums]

        return self._baton.meet(f"InstanceNorm {name!r}", (count, values), mean)

    @property
    def first(self) -> bool:
        """True if this thread belongs to the first party."""
        return self._baton.party == 0


class _OfAll:
    """The sums over all parties, from which the gradients of weight and bias are made.

    The first party that asks takes them, so that they are added once; the others get None.
    """

    def __init__(self, sums: Tensor) -> None:
        self._sums: Tensor | None = sums

    def take(self) -> tuple[Tensor, Tensor] | None:
        sums, self._sums = self._sums, None
        return None if sums is None else (sums[0], sums[1])


class _Normalise(torch.autograd.Function):
    """`y = w (x - mean) · invstd + b` with the moments of the whole batch, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        whole: Merged,
        eps: float,
        meetings: Meetings,
        name: str,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.whole, ctx.eps, ctx.meetings, ctx.name = whole, eps, meetings, name
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
        sums: tuple[Tensor, Tensor] | None = backward_sums(dy, x, whole, eps)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            shared, of_all = ctx.meetings.input_gradient(
                ctx.name,
                sums,
                lambda means: InputGradient(weight, whole, means, eps, x.dim()),
                whole.count,
            )
            sums = of_all.take()
            dx = shared.of(dy, x)
        if sums is not None and ctx.needs_input_grad[1]:
            dweight = sums[1] * whole.invstd(eps)
            if dweight.dtype != weight.dtype:
                dweight = dweight.to(weight.dtype)
        if sums is not None and ctx.needs_input_grad[2]:
            dbias = sums[0] if sums[0].dtype == ctx.bias_dtype else sums[0].to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None, None, None


_normalise: Callable[..., Tensor] = _Normalise.apply


def _batchnorm(
    meetings: Meetings, name: str, module: nn.Module, found: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        if not uses_batch_statistics(module):
            return found(*args, **kwargs)
        if type(module).forward in PLAIN and getattr(found, "__func__", None) in PLAIN:
            assert isinstance(module, _BatchNorm)
            x = given_to(args, kwargs)
            module._check_input_dim(x)
            return meetings.norm(
                name, x, module.weight, module.bias, module.eps, lambda whole: move(module, whole)
            )
        with _Inside(meetings, name, module) as inside:
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
    meetings: Meetings, name: str, module: nn.Module, found: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        buffers = {k: b for k, b in running_buffers(module).items() if b.is_floating_point()}
        if not module.training or not buffers:
            return found(*args, **kwargs)
        # The running statistics move towards the mean over samples. That equals the mean of the
        # statistics after each micro-batch alone, weighted by samples.
        before = {key: buffer.detach().clone() for key, buffer in buffers.items()}
        try:
            out = found(*args, **kwargs)
            after = [buffer.detach().clone() for buffer in buffers.values()]
        finally:
            with torch.no_grad():
                for key, buffer in buffers.items():
                    buffer.copy_(before[key])
        if not recomputing():
            whole = meetings.weighted(name, instances(module, given_to(args, kwargs)), after)
            if meetings.first:
                with torch.no_grad():
                    for buffer, value in zip(buffers.values(), whole, strict=True):
                        buffer.copy_(value)
        return out

    return forward


class _Inside(InsideNorm):
    """A context that turns F.batch_norm inside a layer's custom forward into a meeting."""

    def __init__(self, meetings: Meetings, name: str, module: nn.Module) -> None:
        super().__init__(self._meet)
        self.calls = 0
        self._meetings = meetings
        self._name = name
        self._tracked = None
        if recomputing() or not meetings.first:
            # The layer's forward counts the batch itself, and may derive its momentum from the
            # count. This window is counted already, so lower the count before it counts again.
            self._tracked = running_buffers(module).get("num_batches_tracked")
        if self._tracked is not None:
            self._count = self._tracked.detach().clone()
            self._tracked.sub_(1)

    def _meet(
        self,
        x: Tensor,
        running: tuple[Tensor | None, Tensor | None],
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        self.calls += 1
        if self._tracked is not None:
            self._tracked.copy_(self._count)
        return self._meetings.norm(
            self._name,
            x,
            weight,
            bias,
            eps,
            lambda whole: move_buffers(*running, momentum, whole),
        )
