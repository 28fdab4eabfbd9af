"""Where every run of a proof begins: the same weights, buffers, optimizer state and random numbers.

All runs are made on the model itself, one after the other, and each begins by putting back what
the one before has moved: wrapped and sharded models, which cannot be copied, are proven too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.forward_state import capture_random, restore_random

__all__ = ["Start"]


class Start:
    """A moment of a model and its optimizer, kept on the host, to come back to.

    Kept are parameters and buffers, whatever else the modules hold (modes, hooks, counters, the
    modules themselves: a BatchNorm policy may have exchanged some), the optimizer's state and
    settings, and the random generators.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.random = capture_random()
        self._tensors = [(tensor, _kept(tensor)) for tensor in _tensors_of(model)]
        self._kept = {id(tensor): kept for tensor, kept in self._tensors}
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        self._flags = [(p, p.requires_grad) for p in model.parameters()]
        self._modules = [(module, _shallow(vars(module))) for module in model.modules()]
        self._groups: list[dict[str, Any]] = []
        self._state: dict[Tensor, dict[str, Any]] = {}
        if optimizer is not None:
            self._groups = [
                {name: copy.copy(value) for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ]
            self._state = {
                parameter: {name: _copied(value) for name, value in state.items()}
                for parameter, state in optimizer.state.items()
            }

    @torch.no_grad()
    def restore(self) -> None:
        """Everything as it was, but without gradients: the next run begins."""
        for module, _ in self._modules:
            reshard: Any = getattr(module, "reshard", None)
            if callable(reshard):  # FSDP2, after a forward alone
                reshard()
        for module, attributes in self._modules:
            _put_back(vars(module), attributes)
        for tensor, kept in self._tensors:
            tensor.copy_(kept)
        for one, flag in self._flags:
            one.grad = None
            one.requires_grad_(flag)
        if self.optimizer is not None:
            for group, settings in zip(self.optimizer.param_groups, self._groups, strict=True):
                for name in set(group) - {"params", *settings}:
                    del group[name]
                group.update({name: copy.copy(value) for name, value in settings.items()})
            self.optimizer.state.clear()
            for parameter, state in self._state.items():
                self.optimizer.state[parameter] = {n: _copied(v) for n, v in state.items()}
        restore_random(self.random)

    def leave(self) -> None:
        """Everything as it was, the gradients too: the proof is over."""
        self.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def changed_attributes(self) -> list[str]:
        """`module.attribute` of every number or tensor, not a buffer, that is not as it was."""
        names = {id(module): name for name, module in self.model.named_modules()}
        changed = []
        for module, attributes in self._modules:
            for name, now in vars(module).items():
                before = attributes.get(name)
                is_plain = isinstance(now, int | float | str) and name != "training"
                if (is_plain and now != before) or (isinstance(now, Tensor) and now is not before):
                    changed.append(f"{names.get(id(module), '')}.{name}".lstrip("."))
        return changed

    def knows(self, tensor: Tensor) -> bool:
        """Whether it was there at the start (a forward may have exchanged a buffer)."""
        return id(tensor) in self._kept

    def before(self, tensor: Tensor) -> Tensor:
        """The values that a parameter or buffer had at the start; of a shard, the whole of it."""
        kept = self._kept[id(tensor)]
        if hasattr(kept, "full_tensor"):
            whole: Tensor = kept.full_tensor()
            return whole
        return kept


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _kept(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    if hasattr(detached, "to_local"):  # a shard stays what it is: copies go shard to shard
        return detached.clone()
    return detached.to("cpu", copy=True)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes with their containers copied one level deep: `_modules`, hooks, lists."""
    return {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value
        for name, value in attributes.items()
    }


def _put_back(attributes: dict[str, Any], saved: dict[str, Any]) -> None:
    """In place where a container is still the same kind: handles of hooks refer to their dict."""
    for name in attributes.keys() - saved.keys():
        del attributes[name]
    for name, value in saved.items():
        now = attributes.get(name)
        if isinstance(value, dict) and isinstance(now, dict):
            now.clear()
            now.update(value)
        elif isinstance(value, dict | list | set):
            attributes[name] = copy.copy(value)
        else:
            attributes[name] = value
