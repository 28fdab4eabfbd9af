"""One window of training, observed from a starting state that every run comes back to."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wholebatch.core import random_state

__all__ = ["Run", "Seen", "Start", "Watch", "host_copy"]


class Start:
    """A moment of a model and its optimizer, kept on the host, to come back to.

    Kept are parameters and buffers, whatever else the modules hold (modes, hooks, counters, the
    modules themselves: a BatchNorm policy may have exchanged some), the optimizer's state and
    settings, and the random generators.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.random = random_state.capture()
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
        random_state.restore(self.random)

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


# By its name: `torch.nn.utils` has a deprecated function that hides the module.
_clip_grad: Any = importlib.import_module("torch.nn.utils.clip_grad")


@dataclass(frozen=True)
class Seen:
    """One optimizer step: the gradients it was given, and the settings of its parameter groups."""

    gradients: tuple[Tensor | None, ...]
    groups: tuple[dict[str, Any], ...]
    optimizer: int  # id of the optimizer that stepped
    stepped: frozenset[int] = frozenset()  # places of the parameters that it stepped on


@dataclass(frozen=True)
class Run:
    """One window, observed: its steps and the change of every parameter, on the host."""

    steps: tuple[Seen, ...]
    update: tuple[Tensor, ...]
    loss: float | None = None
    notes: tuple[str, ...] = ()

    def joined(self) -> Run:
        """Steps on a few parameters at a time, seen as the one step that they make together."""
        if len(self.steps) < 2:
            return self
        gradients: list[Tensor | None] = [None] * len(self.update)
        for step in self.steps:
            for place in step.stepped:
                gradients[place] = step.gradients[place]
        return replace(self, steps=(replace(self.steps[0], gradients=tuple(gradients)),))

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """What the only step saw."""
        return self.steps[0].gradients if self.steps else (None,) * len(self.update)


@dataclass
class Watch:
    """Watches every optimizer that steps on `parameters`, while it is entered.

    It also notes how clipping is called and under which autocast the model runs: a loop of
    someone else's does not say. `clip_to` stands in for the loop's own limit of the norm.
    """

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    clip_to: float | None = None
    steps: list[Seen] = field(default_factory=list)
    clip_norms: list[float] = field(default_factory=list)
    clip_values: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    autocast: set[torch.dtype] = field(default_factory=set)
    scaler_steps: int = 0

    def __enter__(self) -> Watch:
        self._mine = {id(parameter) for parameter in self.parameters}
        self._undo: list[Callable[[], None]] = []
        handle = register_optimizer_step_pre_hook(self._look)
        self._undo.append(handle.remove)
        self._undo.append(self.model.register_forward_pre_hook(self._forward).remove)
        self._patch(_clip_grad, "_clip_grads_with_norm_", self._clips_norm)
        self._patch(_clip_grad, "clip_grad_value_", self._clips_value)
        self._patch(torch.nn.utils, "clip_grad_value_", self._clips_value)
        self._patch(torch.amp.GradScaler, "step", self._scaler_step)
        return self

    def __exit__(self, *error: object) -> None:
        for undo in reversed(self._undo):
            undo()

    def run(self, start: Start, loss: float | None = None) -> Run:
        """What was seen, with the update since `start`."""
        update = tuple(_change(parameter, start.before(parameter)) for parameter in self.parameters)
        return Run(tuple(self.steps), update, loss)

    def _patch(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, replaced)
        self._undo.append(lambda: setattr(owner, name, original))

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        if not any(id(p) in self._mine for group in groups for p in group["params"]):
            return
        scale = getattr(optimizer, "grad_scale", None)
        gradients = tuple(
            None if parameter.grad is None else host_copy(parameter.grad)
            for parameter in self.parameters
        )
        if scale is not None:  # a fused optimizer divides by it in its own kernel
            for gradient in gradients:
                if gradient is not None:
                    gradient.div_(float(scale))
        settings = tuple({n: v for n, v in group.items() if n != "params"} for group in groups)
        mine = {id(p) for group in groups for p in group["params"]}
        stepped = frozenset(i for i, p in enumerate(self.parameters) if id(p) in mine)
        self.steps.append(Seen(gradients, settings, id(optimizer), stepped))

    def _forward(self, *_: Any) -> None:
        kind = self.parameters[0].device.type
        if torch.is_autocast_enabled(kind):
            self.autocast.add(torch.get_autocast_dtype(kind))

    def _clips_norm(
        self,
        original: Any,
        parameters: Any,
        max_norm: float,
        total_norm: Tensor,
        foreach: bool | None = None,
    ) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(id(parameter) in self._mine for parameter in parameters):
            self.clip_norms.append(float(max_norm))
            self.norms.append(float(total_norm))
            if self.clip_to is not None:
                max_norm = self.clip_to
        return original(parameters, max_norm, total_norm, foreach)

    def _clips_value(
        self, original: Any, parameters: Any, clip_value: float, foreach: bool | None = None
    ) -> Any:
        self.clip_values.append(float(clip_value))
        if self.clip_to is not None:
            clip_value = math.inf  # only the norm is tried out; the scale must be seen
        return original(parameters, clip_value, foreach)

    def _scaler_step(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self.scaler_steps += 1
        return original(scaler, *args, **kwargs)


@torch.no_grad()
def _change(parameter: Tensor, before: Tensor) -> Tensor:
    """What was added to a parameter, on the host; made where the parameter is, for speed."""
    now = dense(parameter)
    return (now - dense(before).to(now.device)).cpu()


@torch.no_grad()
def dense(tensor: Tensor) -> Tensor:
    """The whole of a sharded or sparse tensor, in float32 or better."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@torch.no_grad()
def host_copy(tensor: Tensor) -> Tensor:
    """A dense copy on the host."""
    return dense(tensor).to("cpu", copy=True)
