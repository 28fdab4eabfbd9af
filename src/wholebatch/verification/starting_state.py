"""A moment of a model and its optimizer, to come back to.

All runs of a proof use the model itself, one after the other, and each starts by restoring the
initial state. So wrapped and sharded models, which cannot be copied, are proven too.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.window.forward_state import capture_random, restore_random


class StartingState:
    """A moment of a model and its optimizer, kept on the host, to come back to.

    Kept are parameters and buffers, whatever else the modules hold (modes, hooks, counters, the
    modules themselves: a BatchNorm policy may have exchanged some), the optimizer's state and
    settings, and the random generators.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.random = capture_random()
        tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        self._tensors = [(tensor, _kept(tensor)) for tensor in tensors]
        self._kept = {id(tensor): kept for tensor, kept in self._tensors}
        self._parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
        self._modules = [(module, _shallow(vars(module))) for module in model.modules()]
        self._groups = [
            {name: copy.copy(value) for name, value in group.items() if name != "params"}
            for group in ([] if optimizer is None else optimizer.param_groups)
        ]
        self._state: dict[Tensor, dict[str, Any]] = {
            parameter: {name: _copied(value) for name, value in state.items()}
            for parameter, state in ({} if optimizer is None else optimizer.state).items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, without gradients: the next run begins."""
        for module, _ in self._modules:
            reshard: Any = getattr(module, "reshard", None)
            if callable(reshard):  # FSDP2, after a forward alone
                reshard()
        for module, attributes in self._modules:
            _put_back(vars(module), attributes)
        for tensor, kept in self._tensors:
            tensor.copy_(kept)
        for parameter, _, is_trained in self._parameters:
            parameter.grad = None
            parameter.requires_grad_(is_trained)
        if self.optimizer is not None:
            for group, settings in zip(self.optimizer.param_groups, self._groups, strict=True):
                for name in set(group) - {"params", *settings}:
                    del group[name]
                group.update({name: copy.copy(value) for name, value in settings.items()})
            self.optimizer.state.clear()
            for owner, state in self._state.items():
                self.optimizer.state[owner] = {n: _copied(v) for n, v in state.items()}
        restore_random(self.random)

    def leave(self) -> None:
        """Put everything back with its gradients: the proof is over."""
        self.restore()
        for parameter, gradient, _ in self._parameters:
            parameter.grad = gradient

    def update(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what was added to each of these parameters since the start, on the host."""
        return tuple(_change(parameter, self.before(parameter)) for parameter in parameters)

    def before(self, tensor: Tensor) -> Tensor:
        """Return the values of a parameter or buffer at the start; of a shard, the whole of it."""
        kept = self._kept[id(tensor)]
        whole: Tensor = kept.full_tensor() if hasattr(kept, "full_tensor") else kept
        return whole


def _kept(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    if hasattr(detached, "to_local"):  # a shard stays what it is: copies go shard to shard
        return detached.clone()
    return detached.to("cpu", copy=True)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _shallow(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each attribute, and what it holds if it is a container: `_modules`, hooks, lists."""
    return {
        name: (value, _copy_of(value) if isinstance(value, dict | list | set) else None)
        for name, value in attributes.items()
    }


def _put_back(attributes: dict[str, Any], saved: dict[str, tuple[Any, Any]]) -> None:
    """Restore attributes, and what containers hold, in place: handles of hooks refer to them."""
    for name in attributes.keys() - saved.keys():
        del attributes[name]
    for name, (value, content) in saved.items():
        attributes[name] = value
        if content is not None:
            _refill(value, content)


def _copy_of(container: Any) -> Any:
    """Return what a container holds, as one of the base type."""
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _refill(container: Any, values: Any) -> None:
    """Make a container hold these values again, if it does not.

    It is written by its base type: the methods of a class of the user's may do more, or refuse.
    """
    base: Any = next(kind for kind in (OrderedDict, dict, list, set) if isinstance(container, kind))
    if _holds(container, values):
        return
    base.clear(container)
    if issubclass(base, dict):
        for key, value in values.items():
            base.__setitem__(container, key, value)
    else:
        (set.update if base is set else base.extend)(container, values)


def _holds(container: Any, values: Any) -> bool:
    """True if a container holds these very objects, in this order."""
    if isinstance(container, set):
        return bool(container == values)
    if isinstance(container, dict):
        same_keys = list(container) == list(values)
        container, values = container.values(), values.values()
    else:
        same_keys = len(container) == len(values)
    return same_keys and all(map(operator.is_, container, values))


@torch.no_grad()
def _change(parameter: Tensor, before: Tensor) -> Tensor:
    """Return what was added to a parameter, on the host; computed on its device, for speed."""
    now = dense(parameter)
    return (now - dense(before).to(now.device)).cpu()


@torch.no_grad()
def dense(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded or sparse tensor, in float32 or better."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
