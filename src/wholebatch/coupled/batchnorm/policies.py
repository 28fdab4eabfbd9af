"""Policies for BatchNorm under gradient accumulation, besides the exact one.

| policy | normalises with | running statistics | gradient of the undivided batch |
|---|---|---|---|
| `"exact"` | the window | of the window, once | yes (the lock-step runner; needs `WholeBatch`) |
| `"statistics"` | the micro-batch | merged over the window, once | no |
| `"freeze"` | the running statistics | untouched | yes, of the frozen model |
| `"group"`, `"layer"` | each sample alone | none any more | yes, of the converted model |
| `"sync"` | the micro-batch on all ranks | every micro-batch | no |
| `"refuse"` | (an error names the layers) | | |

```python
policy = choose("statistics", model)       # converts the model, or attaches to it
policy.begin_window()
for micro in window:
    ...forward and backward...
    policy.micro()                         # this micro-batch is done
policy.end_window()
policy.detach()                            # restores the model's forward methods
```
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast, final, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from wholebatch.coupled.batchnorm.whole_batch_norm import (
    Moments,
    Reduce,
    layer_input,
    mean_over_samples,
    merge,
    recomputing,
    samples_in,
    update_running,
)
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    replace_forward,
    running_buffers,
    tracked_instance_norms,
    uses_batch_statistics,
)
from wholebatch.errors import OptionError, StateError, UnsupportedError
from wholebatch.window.forward_state import replaced_attributes

_log = logging.getLogger("wholebatch")
Choice = Literal["statistics", "freeze", "group", "layer", "sync", "refuse"]


class Policy:
    """The calls that an accumulating loop makes for each window; by default they do nothing."""

    def begin_window(self) -> None:
        """Begin a window, before its first micro-batch."""

    def micro(self) -> None:
        """End a micro-batch, after its forward."""

    def end_window(self) -> None:
        """End the window, when its update is made."""

    def discard_window(self) -> None:
        """Discard the window and leave the running statistics as they are."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of an unfinished window, for a checkpoint in the middle of it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the window of `state`."""

    def detach(self) -> None:
        """Restore the model's forward methods; a conversion is kept."""


def choose(name: str, model: nn.Module, *, reduce: Reduce | None = None) -> Policy:
    """Apply the policy of that name to `model`, and return it.

    `reduce` sums a tensor over data-parallel ranks, for `"statistics"` of the global batch.

    >>> policy = choose("group", nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64)))
    >>> print(policy)
    1: GroupNorm(32, 64)
    """
    if name not in get_args(Choice):
        allowed = ", ".join(f'"{choice}"' for choice in get_args(Choice))
        raise OptionError(f'batchnorm="{name}": must be one of {allowed}')
    if name in ("statistics", "sync"):
        _check_device(name, model)
    tracked = tracked_instance_norms(model)
    if name == "statistics" or (tracked and not batchnorms(model)):
        return Statistics([*batchnorms(model), *tracked], reduce=reduce)
    if name == "freeze":
        return Freeze(batchnorms(model))
    if name == "refuse":
        return Refuse(batchnorms(model))
    return convert(model, cast(Literal["group", "layer", "sync"], name))


def _check_device(name: str, model: nn.Module) -> None:
    """Refuse SyncBatchNorm among ranks on a CPU: torch runs it on accelerators only."""
    parameter = next(model.parameters(), None)
    has_ranks = dist.is_available() and dist.is_initialized()
    if parameter is None or parameter.device.type != "cpu" or not has_ranks:
        return
    norms = [
        layer
        for layer, module in batchnorms(model)
        if name == "sync" or isinstance(module, nn.SyncBatchNorm)
    ]
    if norms:
        shown = ", ".join(map(repr, norms[:3])) + (" and more" if norms[3:] else "")
        raise UnsupportedError(
            f'batchnorm="{name}" with SyncBatchNorm in {shown} on a CPU: torch runs it on GPUs '
            'only. WholeBatch(batchnorm="exact") includes all ranks and runs on a CPU (plain '
            'models and DDP); or accept batchnorm="freeze", "group" or "layer"'
        )


@final
class Refuse(Policy):
    """A policy that refuses layers that use batch statistics.

    It checks at construction and at the start of every window, because `model.train()` may come
    later. A model whose BatchNorms are in evaluation mode passes.
    """

    def __init__(self, norms: Sequence[tuple[str, nn.Module]]) -> None:
        self.norms = tuple(norms)
        self.begin_window()

    def begin_window(self) -> None:
        names = [repr(name) for name, module in self.norms if uses_batch_statistics(module)]
        if not names:
            return
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise UnsupportedError(
            f"BatchNorm in {shown}: it would normalise with each micro-batch alone, and the update "
            'would not be that of the whole batch. WholeBatch(batchnorm="exact") is exact (plain '
            "models and DDP); or name what you accept: "
            'batchnorm="statistics", "freeze", "group", "layer", or "sync" (ranks on GPUs)'
        )


@final
class Freeze(Policy):
    """A policy that runs BatchNorms in evaluation mode until `detach`, despite `model.train()`."""

    def __init__(self, norms: Sequence[tuple[str, nn.Module]]) -> None:
        without = [name for name, module in norms if getattr(module, "running_mean", None) is None]
        if without:
            raise UnsupportedError(
                f'batchnorm="freeze": {", ".join(map(repr, without))} keep no running statistics '
                'to be frozen with: use "exact", "group" or "layer"'
            )
        self._replaced = ExitStack()
        for _, module in norms:
            replace_forward(self._replaced, module, _frozen(module, module.forward))

    def detach(self) -> None:
        self._replaced.close()


def _frozen(module: nn.Module, found: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with replaced_attributes(module, training=False):
            return found(*args, **kwargs)

    return forward


@final
class Converted(Policy):
    """The layers that replaced BatchNorms, as pairs of name and new layer."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self.layers = tuple(layers)

    def __str__(self) -> str:
        sizes = [
            f"({layer.num_groups}, {layer.num_channels})" if isinstance(layer, nn.GroupNorm) else ""
            for _, layer in self.layers
        ]
        named = zip(self.layers, sizes, strict=True)
        return "\n".join(f"{name}: {type(layer).__name__}{size}" for (name, layer), size in named)


def convert(model: nn.Module, to: Literal["group", "layer", "sync"]) -> Converted:
    """Replace every BatchNorm inside `model`, keeping its affine weights.

    The parameters stay the same objects, so the optimizer keeps updating them. `"group"` takes the
    number of groups from `groups_for`; `"layer"` uses one group.
    """
    found = batchnorms(model)
    for name, module in found:
        if module is model:
            raise UnsupportedError(
                f"the model itself is a {type(module).__name__}, which cannot be replaced inside "
                "it: put it into an nn.Sequential"
            )
        if any(nn.parameter.is_lazy(parameter) for parameter in module.parameters()):
            raise UnsupportedError(
                f"{name!r} is lazy and has no weights yet: run one batch through the model first"
            )
    replaced: dict[int, nn.Module] = {}
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if isinstance(child, _BatchNorm):
                if id(child) not in replaced:
                    replaced[id(child)] = _replacement(child, to)
                setattr(parent, child_name, replaced[id(child)])
    return Converted([(name, replaced[id(module)]) for name, module in found])


def groups_for(channels: int, *, spatial: bool = True) -> int:
    """Return the number of groups for a GroupNorm of that many channels.

    This is 32, or the largest smaller divisor of the channels that leaves each group enough values
    to normalise over: 2 channels if there are spatial positions to average over, 16 if not.

    >>> [groups_for(channels) for channels in (3, 16, 24, 64, 96, 2048)]
    [1, 8, 12, 32, 32, 32]
    """
    least = 2 if spatial else 16
    fits = (g for g in range(min(32, channels), 0, -1) if channels % g == 0)
    return next((groups for groups in fits if channels // groups >= least), 1)


def _replacement(norm: _BatchNorm, to: str) -> nn.Module:
    if to == "sync":
        synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
        return synced.train(norm.training)
    spatial = not isinstance(norm, nn.BatchNorm1d)
    groups = 1 if to == "layer" else groups_for(norm.num_features, spatial=spatial)
    layer = nn.GroupNorm(groups, norm.num_features, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        layer.weight, layer.bias = norm.weight, norm.bias
    return layer.train(norm.training)


@final
class Statistics(Policy):
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
        self._largest = 0  # micro-batch of this window
        self._told = False
        self._replaced = ExitStack()
        for name, module in norms:
            replace_forward(self._replaced, module, self._recording(name, module, module.forward))

    @property
    def spans_ranks(self) -> bool:
        """True if the end of a window runs collectives."""
        return self._reduce is not None and bool(self._norms)

    def begin_window(self) -> None:
        self.discard_window()

    def micro(self) -> None:
        self._calls.clear()

    def end_window(self) -> None:
        if self._largest and self._largest < 8 and not self._told:
            _log.warning(
                'batchnorm="statistics": micro-batches of %d normalise by themselves; below 8 the '
                'update is far from that of the whole batch: use "exact", "group" or larger ones',
                self._largest,
            )
        self._told = self._told or self._largest > 0
        with torch.no_grad():
            if self._reduce is not None:
                self._end_on_all_ranks(self._reduce)
            else:
                for name, module in self._norms.items():
                    for part in self._pending.get(name, ()):
                        _move(module, part, None)
        self.discard_window()

    def _end_on_all_ranks(self, reduce: Reduce) -> None:
        """Update every layer that was called on some rank; a rank without data adds nothing."""
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
        self._largest = 0

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
        self._replaced.close()

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
                x = layer_input(args, kwargs)
                if isinstance(module, _BatchNorm):
                    self._largest = max(self._largest, len(x))
                self._add(name, _moments(module, x, mean, var))
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
            count = parts[call].count + part.count
            parts[call] = Moments(count, *mean_over_samples([parts[call], part]))


@contextmanager
def _scratch(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Swap in scratch buffers that a forward with momentum 1 fills with its batch's statistics."""
    assert isinstance(module, _NormBase)
    scratch = {name: torch.zeros_like(b) for name, b in running_buffers(module).items()}
    buffers = {**module._buffers, **scratch}
    with replaced_attributes(module, _buffers=buffers, momentum=1.0):
        yield scratch["running_mean"], scratch["running_var"]


def _filled(module: nn.Module, mean: Tensor, var: Tensor) -> bool:
    """True if the forward updated its running statistics; that of a subclass may not."""
    if type(module).forward in (_BatchNorm.forward, _InstanceNorm.forward):
        return True
    return bool(mean.any() | var.any())


def _moments(module: nn.Module, x: Tensor, mean: Tensor, var: Tensor) -> Moments:
    """Return the moments of `x` from what the layer left in its scratch buffers."""
    wide = torch.float64 if mean.dtype == torch.float64 else torch.float32
    mean, var = mean.to(wide), var.to(wide)
    if isinstance(module, _BatchNorm):
        count = x.numel() // x.shape[1]
        return Moments(count, mean, var * ((count - 1) / count))  # `var` is the unbiased one.
    return Moments(samples_in(module, x), mean, var)


def _no_moments(module: nn.Module) -> Moments:
    assert isinstance(module, _NormBase)
    assert module.running_mean is not None
    wide = torch.float64 if module.running_mean.dtype == torch.float64 else torch.float32
    nothing = torch.zeros_like(module.running_mean, dtype=wide)
    return Moments(0, nothing, nothing)


def _move(module: nn.Module, part: Moments, reduce: Reduce | None) -> None:
    """Update a layer's running statistics from the moments of a window."""
    if isinstance(module, _BatchNorm):
        update_running(module, merge([part], reduce))
        return
    assert isinstance(module, _NormBase)
    mean, var = part.mean, part.var
    if reduce is not None:
        mean, var = mean_over_samples([part], reduce)
    factor = module.momentum or 0.0
    for buffer, value in ((module.running_mean, mean), (module.running_var, var)):
        if buffer is not None:
            buffer.copy_(buffer * (1.0 - factor) + value * factor)
