"""A moment of a model and its optimizer, to come back to.

All runs of a proof use the model itself, one after the other, and each starts by restoring the
initial state. So wrapped and sharded models, which cannot be copied, are proven too.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.window.forward_state import ForwardState


class StartingState:
    """A moment of a model and its optimizer, kept on the host, to come back to.

    Kept are the parameters, what a forward or a BatchNorm policy changes in the modules (buffers,
    modes, counters, hooks, the modules themselves), the optimizer's state and settings, and the
    random generators.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.forward = ForwardState(model)
        parameters = list(model.parameters())
        self._tensors = [(p, _kept(p)) for p in parameters]
        self._kept = {id(tensor): kept for tensor, kept in self._tensors}
        self._parameters = [(p, p.grad, p.requires_grad) for p in parameters]
        self._modules = [(module, module.training) for module in model.modules()]
        held = [value for module, _ in self._modules for value in vars(module).values()]
        self._dicts = [(each, dict(each)) for each in held if type(each) in (dict, OrderedDict)]
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
        for module, is_training in self._modules:
            reshard: Any = getattr(module, "reshard", None)
            if callable(reshard):  # FSDP2, after a forward alone
                reshard()
            module.training = is_training
        for inner, entries in self._dicts:  # in place: handles of hooks refer to them
            if list(map(id, inner.values())) != list(map(id, entries.values())):
                inner.clear()
                inner.update(entries)
        self.forward.restore()
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

    def leave(self) -> None:
        """Put everything back with its gradients: the proof is over."""
        self.restore()
        for parameter, gradient, _ in self._parameters:
            parameter.grad = gradient

    def update(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what was added to each of these parameters since the start, on the host."""
        return tuple(_change(parameter, self.before(parameter)) for parameter in parameters)

    def before(self, tensor: Tensor) -> Tensor:
        """Return the values of a parameter at the start; of a shard, the whole of it."""
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
