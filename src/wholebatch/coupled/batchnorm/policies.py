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

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, final, get_args

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from wholebatch.coupled.batchnorm.moments import Reduce
from wholebatch.coupled.batchnorm.running_statistics import Statistics
from wholebatch.coupled.normalisation_layers import (
    batchnorms,
    tracked_instance_norms,
    uses_batch_statistics,
)
from wholebatch.coupled.replaced_forwards import ReplacedForwards
from wholebatch.errors import OptionError, UnsupportedError

__all__ = ["Choice", "Converted", "Freeze", "Policy", "Refuse", "choose", "convert", "groups_for"]

Choice = Literal["statistics", "freeze", "group", "layer", "sync", "refuse"]


class Policy(Protocol):
    """The calls that an accumulating loop makes for each window. Unneeded calls cost nothing."""

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
    if name == "statistics":
        return Statistics([*batchnorms(model), *tracked_instance_norms(model)], reduce=reduce)
    if name == "freeze":
        return Freeze(batchnorms(model))
    if name == "refuse":
        return Refuse(batchnorms(model))
    return convert(model, "group" if name == "group" else "layer" if name == "layer" else "sync")


def _check_device(name: str, model: nn.Module) -> None:
    """Refuse SyncBatchNorm among ranks on a CPU: torch runs it on accelerators only."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cpu" or not _has_ranks():
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


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


class _NothingPerWindow:
    """The base of policies that keep no state per window."""

    def begin_window(self) -> None:
        pass

    def micro(self) -> None:
        pass

    def end_window(self) -> None:
        pass

    def discard_window(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def detach(self) -> None:
        pass


@final
class Refuse(_NothingPerWindow):
    """A policy that refuses layers that use batch statistics.

    It checks at construction and at the start of every window, because `model.train()` may come
    later. A model whose BatchNorms are in evaluation mode passes.
    """

    def __init__(self, norms: Sequence[tuple[str, nn.Module]]) -> None:
        self._norms = tuple(norms)
        self.begin_window()

    def begin_window(self) -> None:
        for _, module in self._norms:
            if uses_batch_statistics(module):
                raise UnsupportedError(self._message())

    def _message(self) -> str:
        names = [repr(name) for name, module in self._norms if uses_batch_statistics(module)]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return (
            f"BatchNorm in {shown}: it would normalise with each micro-batch alone, and the update "
            'would not be that of the whole batch. WholeBatch(batchnorm="exact") is exact (plain '
            "models and DDP); or name what you accept: "
            'batchnorm="statistics", "freeze", "group", "layer", or "sync" (ranks on GPUs)'
        )


@final
class Freeze(_NothingPerWindow):
    """A policy that runs BatchNorms in evaluation mode until `detach`, despite `model.train()`."""

    def __init__(self, norms: Sequence[tuple[str, nn.Module]]) -> None:
        without = [name for name, module in norms if getattr(module, "running_mean", None) is None]
        if without:
            raise UnsupportedError(
                f'batchnorm="freeze": {", ".join(map(repr, without))} keep no running statistics '
                'to be frozen with: use "exact", "group" or "layer"'
            )
        self._replaced = ReplacedForwards()
        for _, module in norms:
            self._replaced.replace(module, _frozen(module, module.forward))

    def detach(self) -> None:
        self._replaced.restore()


def _frozen(module: nn.Module, found: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        training = module.training
        module.training = False
        try:
            return found(*args, **kwargs)
        finally:
            module.training = training

    return forward


@final
class Converted(_NothingPerWindow):
    """The layers that replaced BatchNorms, as pairs of name and new layer."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self.layers = tuple(layers)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {_describe(layer)}" for name, layer in self.layers)


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


def _describe(layer: nn.Module) -> str:
    if isinstance(layer, nn.GroupNorm):
        return f"GroupNorm({layer.num_groups}, {layer.num_channels})"
    return type(layer).__name__
