"""Policies for BatchNorm under gradient accumulation.

| policy | normalises with | running statistics | gradient of the undivided batch |
|---|---|---|---|
| `"exact"` | the whole batch, which is not split | of the whole batch | yes (`WholeBatch` only) |
| `"freeze"` | the running statistics | unchanged | yes, of the frozen model |
| `"allow"` | the micro-batch | change with every micro-batch | no |
| `"refuse"` | (an error names the layers) | | |

An InstanceNorm with running statistics has the right gradient in micro-batches, but its running
statistics would change with each of them. The policies treat it like a BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, final, get_args
from weakref import finalize

from torch import nn

from wholebatch.coupled.normalisation_layers import (
    NORMS,
    BatchNorm,
    uses_whole_batch,
    whole_batch_norms,
)
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.window.replaced_attributes import replaced_attributes

Choice = Literal["freeze", "allow", "refuse"]


class Policy:
    """A policy that leaves the layers as they are ("allow")."""

    def begin_window(self) -> None:
        """Begin a window, before its first micro-batch."""

    def detach(self) -> None:
        """Restore the model's forward methods."""


def choose(name: str, model: nn.Module) -> Policy:
    """Apply the policy of that name to `model`, and return it.

    >>> policy = choose("freeze", nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    """
    if name not in get_args(Choice):
        allowed = ", ".join(f'"{choice}"' for choice in ("exact", *get_args(Choice)))
        raise OptionError(f'batchnorm="{name}": must be one of {allowed}')
    if name == "freeze":
        return Freeze(model)
    return Refuse(model) if name == "refuse" else Policy()


@final
class Refuse(Policy):
    """A policy that refuses layers that use batch statistics.

    It checks at construction and at the start of every window, because `model.train()`, or a new
    layer, may come later. A model whose BatchNorms are in evaluation mode passes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.begin_window()

    def begin_window(self) -> None:
        if not any(map(uses_whole_batch, _norms_of(self._model))):
            return
        norms = whole_batch_norms(self._model)
        layers = [(repr(name), module) for name, module in norms if uses_whole_batch(module)]
        names = [name for name, _ in layers]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        kind = "BatchNorm" if isinstance(layers[0][1], BatchNorm) else "InstanceNorm"
        raise UnsupportedError(
            f"{kind} in {shown}: it would use the statistics of each micro-batch, and the update "
            'would not be that of the whole batch. WholeBatch(batchnorm="exact") is exact (plain '
            'models and DDP); batchnorm="freeze" normalises with the running statistics, "allow" '
            "accepts the statistics of each micro-batch; or use GroupNorm, which needs no batch"
        )


@final
class Freeze(Policy):
    """A policy that runs the layers in evaluation mode, despite `model.train()`.

    A layer is frozen as long as a policy for it exists that was not detached.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, norms = model, whole_batch_norms(model)
        without = [name for name, module in norms if getattr(module, "running_mean", None) is None]
        if without:
            raise UnsupportedError(
                f'batchnorm="freeze": {", ".join(map(repr, without))} have no running statistics '
                'to freeze: use "exact", or GroupNorm layers'
            )
        self._frozen = {norm for _, norm in norms}
        _freeze(self._frozen)
        self._thaw = finalize(self, _thaw, self._frozen)
        self._thaw.atexit = False

    def begin_window(self) -> None:
        others = (norm for norm in _norms_of(self._model) if norm not in self._frozen)
        if any(map(uses_whole_batch, others)):
            raise UnsupportedError(
                'batchnorm="freeze": a BatchNorm was added to the model later, and is not frozen; '
                "create this object again after you change the model"
            )

    def detach(self) -> None:
        self._thaw()


def _norms_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, NORMS)]


def _frozen_forward_of(module: nn.Module) -> Any:
    """Return the forward that a policy has given to a layer; None if there is none."""
    forward = vars(module).get("forward")
    return forward if getattr(forward, "func", None) is _frozen_forward else None


def _freeze(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        frozen: Any = _frozen_forward_of(module)
        if frozen is None:
            # A partial, so that in a copy of the model it runs the module of the copy.
            frozen = partial(_frozen_forward, module, module.forward)
            frozen.policies, frozen.own = 0, vars(module).get("forward")
            module.forward = frozen
        frozen.policies += 1


def _thaw(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        frozen = _frozen_forward_of(module)
        if frozen is None:
            continue  # other code has replaced it
        frozen.policies -= 1
        if not frozen.policies:
            del module.forward
            if frozen.own is not None:
                module.forward = frozen.own


def _frozen_forward(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with replaced_attributes(module, training=False):
        return forward(*args, **kwargs)
