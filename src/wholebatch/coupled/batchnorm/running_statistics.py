"""Running statistics of a window whose micro-batches are normalised separately."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from wholebatch.coupled.batchnorm.fixed_norms import given_to
from wholebatch.coupled.batchnorm.moments import Moments, Reduce, merge, move, recomputing
from wholebatch.coupled.normalisation_layers import running_buffers
from wholebatch.coupled.replaced_forwards import ReplacedForwards
from wholebatch.errors import StateError

__all__ = ["Statistics", "instances"]


@final
class Statistics:
    """A policy that updates running statistics once per window, from all its micro-batches.

    Every micro-batch is normalised with its own mean and variance. Only the running statistics are
    exactly those of the window. Call `micro()` after each forward: it tells the second call of a
    reused layer from the first call in the next micro-batch.
    """

    def __init__(
        self, norms: Sequence[tuple[str, nn.Module]], *, reduce: Reduce | None = None
    ) -> None:
        self._norms = dict(norms)
        self._reduce = reduce
        # Moments so far, by layer and by the index of its call within a forward.
        self._pending: dict[str, list[Moments]] = {}
        self._calls: dict[str, int] = {}
        self.counts = True  # False while a micro-batch only stands in for one of another rank
        self._replaced = ReplacedForwards()
        for name, module in norms:
            self._replaced.replace(module, self._recording(name, module, module.forward))

    @property
    def spans_ranks(self) -> bool:
        """True if the end of a window runs collectives."""
        return self._reduce is not None and bool(self._norms)

    def begin_window(self) -> None:
        self.discard_window()

    def micro(self) -> None:
        self._calls.clear()

    def end_window(self) -> None:
        with torch.no_grad():
            if self._reduce is not None:
                self._end_on_all_ranks(self._reduce)
            else:
                for name, module in self._norms.items():
                    for part in self._pending.get(name, ()):
                        _move(module, part, None)
        self.discard_window()

    def _end_on_all_ranks(self, reduce: Reduce) -> None:
        """Every layer that was called on some rank; one without data takes part with nothing."""
        tracked = {
            name: module
            for name, module in self._norms.items()
            if getattr(module, "running_mean", None) is not None
        }
        for call in itertools.count() if tracked else ():
            own = [self._pending.get(name, [])[call : call + 1] for name in tracked]
            device = next(iter(running_buffers(next(iter(tracked.values()))).values())).device
            called = reduce(torch.tensor([float(len(part)) for part in own], device=device))
            if not bool(called.any()):
                return
            for module, part, ranks in zip(tracked.values(), own, called.tolist(), strict=True):
                if ranks:
                    _move(module, part[0] if part else _no_moments(module), reduce)

    def discard_window(self) -> None:
        self._pending.clear()
        self._calls.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            name: [(part.count, part.mean.clone(), part.var.clone()) for part in parts]
            for name, parts in self._pending.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        unknown = [name for name in state if name not in self._norms]
        if unknown:
            raise StateError(
                f"statistics of {', '.join(map(repr, unknown))}: this model has no such BatchNorm"
            )
        self._calls.clear()
        self._pending = {}
        for name, parts in state.items():
            device = next(iter(self._norms[name].buffers())).device
            self._pending[name] = [
                Moments(n, mean.to(device), var.to(device)) for n, mean, var in parts
            ]

    def detach(self) -> None:
        self._replaced.restore()

    def _recording(
        self, name: str, module: nn.Module, found: Callable[..., Any]
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not module.training or getattr(module, "running_mean", None) is None:
                return found(*args, **kwargs)
            with _scratch(module) as (mean, var):
                out = found(*args, **kwargs)
            # A recomputed block has already been counted.
            if self.counts and not recomputing() and _filled(module, mean, var):
                self._add(name, _moments(module, given_to(args, kwargs), mean, var))
            return out

        return forward

    def _add(self, name: str, part: Moments) -> None:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        parts = self._pending.setdefault(name, [])
        if call == len(parts):
            parts.append(part)
        elif isinstance(self._norms[name], _BatchNorm):
            both = merge([parts[call], part])
            parts[call] = Moments(parts[call].count + part.count, both.mean, both.var)
        else:
            parts[call] = _mean_over_samples(parts[call], part)


@contextmanager
def _scratch(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Swap in scratch buffers that a forward with momentum 1 fills with its batch's statistics."""
    assert isinstance(module, _NormBase)
    found = dict(module._buffers)
    momentum = module.momentum
    scratch = {name: torch.zeros_like(b) for name, b in running_buffers(module).items()}
    module._buffers.update(scratch)
    module.momentum = 1.0
    try:
        yield scratch["running_mean"], scratch["running_var"]
    finally:
        module._buffers.update(found)
        module.momentum = momentum


def _filled(module: nn.Module, mean: Tensor, var: Tensor) -> bool:
    """True if the forward updated its running statistics; that of a subclass may not."""
    if type(module).forward in (_BatchNorm.forward, _InstanceNorm.forward):
        return True
    return bool(mean.any() | var.any())


def _moments(module: nn.Module, x: Tensor, mean: Tensor, var: Tensor) -> Moments:
    wide = torch.float64 if mean.dtype == torch.float64 else torch.float32
    mean, var = mean.to(wide), var.to(wide)
    if isinstance(module, _BatchNorm):
        count = x.numel() // x.shape[1]
        return Moments(count, mean, var * ((count - 1) / count))  # `var` is the unbiased one.
    return Moments(instances(module, x), mean, var)


def _no_moments(module: nn.Module) -> Moments:
    assert isinstance(module, _NormBase)
    assert module.running_mean is not None
    wide = torch.float64 if module.running_mean.dtype == torch.float64 else torch.float32
    nothing = torch.zeros_like(module.running_mean, dtype=wide)
    return Moments(0, nothing, nothing)


def instances(module: nn.Module, x: Tensor) -> int:
    """Return the number of samples of an InstanceNorm's input: 1 without a batch dimension."""
    assert isinstance(module, _InstanceNorm)
    return 1 if x.dim() == module._get_no_batch_dim() else x.shape[0]


def _mean_over_samples(a: Moments, b: Moments) -> Moments:
    """Average two statistics of an InstanceNorm, weighted by their samples."""
    count = a.count + b.count
    mean = (a.mean * a.count + b.mean * b.count) / count
    return Moments(count, mean, (a.var * a.count + b.var * b.count) / count)


def _move(module: nn.Module, part: Moments, reduce: Reduce | None) -> None:
    if isinstance(module, _BatchNorm):
        move(module, merge([part], reduce))
        return
    count: int | Tensor = part.count
    mean, var = part.mean, part.var
    if reduce is not None:
        mean, var = reduce(mean * count), reduce(var * count)
        count = reduce(mean.new_full((), float(part.count)))
        mean, var = mean / count, var / count
    assert isinstance(module, _NormBase)
    factor = module.momentum or 0.0
    for buffer, value in ((module.running_mean, mean), (module.running_var, var)):
        if buffer is not None:
            buffer.copy_(buffer * (1.0 - factor) + value * factor)
