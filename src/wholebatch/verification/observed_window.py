"""One window of training, observed from a starting state that every run comes back to.

All runs of a proof are made on the model itself, one after the other, and each begins by putting
back what the one before has moved: wrapped and sharded models, which cannot be copied, are proven
too.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wholebatch.core.forward_state import capture_random, restore_random

# By its name: `torch.nn.utils` has a deprecated function that hides the module.
_clip_grad: Any = importlib.import_module("torch.nn.utils.clip_grad")


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
            for one, state in self._state.items():
                self.optimizer.state[one] = {n: _copied(v) for n, v in state.items()}
        restore_random(self.random)

    def leave(self) -> None:
        """Put everything back with its gradients: the proof is over."""
        self.restore()
        for parameter, gradient, _ in self._parameters:
            parameter.grad = gradient

    def changed_attributes(self) -> list[str]:
        """Return `module.attribute` of every changed number or tensor that is not a buffer."""
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
        """Tell if a tensor was there at the start; a forward may have exchanged a buffer."""
        return id(tensor) in self._kept

    def before(self, tensor: Tensor) -> Tensor:
        """Return the values of a parameter or buffer at the start; of a shard, the whole of it."""
        kept = self._kept[id(tensor)]
        if hasattr(kept, "full_tensor"):
            whole: Tensor = kept.full_tensor()
            return whole
        return kept


def _kept(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    if hasattr(detached, "to_local"):  # a shard stays what it is: copies go shard to shard
        return detached.clone()
    return detached.to("cpu", copy=True)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy the attributes, and their containers one level deep: `_modules`, hooks, lists."""
    return {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value
        for name, value in attributes.items()
    }


def _put_back(attributes: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore attributes; a dict is refilled in place, since handles of hooks refer to it."""
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


@dataclass(frozen=True)
class SeenStep:
    """One optimizer step: the gradients it was given, and the settings of its parameter groups."""

    gradients: tuple[Tensor | None, ...]
    groups: tuple[dict[str, Any], ...]
    stepped: frozenset[int] = frozenset()  # places of the parameters that it stepped on
    repeatable: bool = True  # by the optimizer that was handed over, without a closure


@dataclass(frozen=True)
class WindowRun:
    """One window, observed: its steps and the change of every parameter, on the host."""

    steps: tuple[SeenStep, ...]
    update: tuple[Tensor, ...]
    loss: float | None = None
    notes: tuple[str, ...] = ()

    def joined(self) -> WindowRun:
        """Return steps on a few parameters at a time as the one step that they make together."""
        if len(self.steps) < 2:
            return self
        gradients: list[Tensor | None] = [None] * len(self.update)
        for step in self.steps:
            for place in step.stepped:
                gradients[place] = step.gradients[place]
        return replace(self, steps=(replace(self.steps[0], gradients=tuple(gradients)),))

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients that the only step saw."""
        return self.steps[0].gradients if self.steps else (None,) * len(self.update)


@dataclass
class WindowObserver:
    """Watches every optimizer that steps on `parameters`, while it is entered.

    It also notes how clipping is called and under which autocast the model runs: a loop of
    someone else's does not say. `clip_to` replaces the loop's own limit of the norm, and with it
    `clip_value_to` that of the values. `settings` are the groups of `optimizer` at every forward
    before the first step.
    """

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    clip_to: float | None = None
    clip_value_to: float = math.inf
    optimizer: torch.optim.Optimizer | None = None
    steps: list[SeenStep] = field(default_factory=list)
    settings: list[tuple[dict[str, Any], ...]] = field(default_factory=list)
    clips: set[str] = field(default_factory=set)  # by "norm", by "value"
    autocast: set[torch.dtype] = field(default_factory=set)
    scaler_steps: int = 0

    def __enter__(self) -> WindowObserver:
        self._mine = {id(parameter) for parameter in self.parameters}
        self._undo: list[Callable[[], None]] = [
            register_optimizer_step_pre_hook(self._before_step).remove,
            *self._forward_hooks(),
        ]
        self._patch(_clip_grad, "_clip_grads_with_norm_", self._clip_norm)
        self._patch_everywhere(torch.nn.utils, "clip_grads_with_norm_", self._clip_norm)
        self._patch_everywhere(torch.nn.utils, "clip_grad_value_", self._clip_value)
        self._patch(torch.amp.GradScaler, "step", self._scaler_step)
        return self

    def _forward_hooks(self) -> list[Callable[[], None]]:
        """Watch the forwards; return how to end that."""
        return [self.model.register_forward_pre_hook(self._before_forward).remove]

    def __exit__(self, *error: object) -> None:
        while self._undo:
            self._undo.pop()()

    def run(self, start: StartingState, loss: float | None = None) -> WindowRun:
        """Return what was seen, with the update since `start`."""
        update = tuple(_change(parameter, start.before(parameter)) for parameter in self.parameters)
        return WindowRun(tuple(self.steps), update, loss)

    def _patch(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, replaced)
        self._undo.append(lambda: setattr(owner, name, original))

    def _patch_everywhere(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Patch a function of a module, also in modules that imported it by its name."""
        original = getattr(owner, name, None)
        for module in list(sys.modules.values()):
            if original is not None and getattr(module, "__dict__", {}).get(name) is original:
                self._patch(module, name, around)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """See the gradients now, or after the step's closure has made them."""
        its_own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        stepped = frozenset(i for i, p in enumerate(self.parameters) if id(p) in its_own)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not stepped:
            return None
        if not callable(closure):
            self._see(optimizer, stepped)
            return None
        evaluations = 0

        def observed() -> Any:
            nonlocal evaluations
            loss = closure()
            evaluations += 1
            if evaluations == 1:  # LBFGS evaluates again, at weights of its own
                self._see(optimizer, stepped, closure=True)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _see(
        self, optimizer: torch.optim.Optimizer, stepped: frozenset[int], *, closure: bool = False
    ) -> None:
        gradients = tuple(
            None if parameter.grad is None else _dense(parameter.grad).to("cpu", copy=True)
            for parameter in self.parameters
        )
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:  # a fused optimizer divides by it in its own kernel
            for gradient in gradients:
                if gradient is not None:
                    gradient.div_(float(scale))
        handed = self.optimizer is None or optimizer is self.optimizer
        step = SeenStep(gradients, settings_of(optimizer), stepped, handed and not closure)
        self.steps.append(step)

    def _before_forward(self, *_: Any) -> None:
        kind = self.parameters[0].device.type
        if torch.is_autocast_enabled(kind):
            self.autocast.add(torch.get_autocast_dtype(kind))
        if self.optimizer is not None and not self.steps:
            self.settings.append(settings_of(self.optimizer))

    def _clip_norm(
        self,
        original: Any,
        parameters: Any,
        max_norm: float,
        total_norm: Tensor,
        foreach: bool | None = None,
    ) -> Any:
        parameters, ours = self._clipped(parameters, "norm")
        if ours and self.clip_to is not None:
            max_norm = self.clip_to
        return original(parameters, max_norm, total_norm, foreach)

    def _clip_value(
        self, original: Any, parameters: Any, clip_value: float, foreach: bool | None = None
    ) -> Any:
        parameters, ours = self._clipped(parameters, "value")
        if ours and self.clip_to is not None:
            clip_value = self.clip_value_to
        return original(parameters, clip_value, foreach)

    def _clipped(self, parameters: Any, how: str) -> tuple[list[Tensor], bool]:
        """Return the clipped parameters as a list and if one is ours; then note how it is done."""
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ours = any(id(parameter) in self._mine for parameter in listed)
        self.clips |= {how} if ours else set()
        return listed, ours

    def _scaler_step(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self.scaler_steps += 1
        return original(scaler, *args, **kwargs)


def settings_of(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Return the settings of every parameter group."""
    return tuple(
        {name: copy.copy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    )


@torch.no_grad()
def _change(parameter: Tensor, before: Tensor) -> Tensor:
    """Return what was added to a parameter, on the host; computed on its device, for speed."""
    now = _dense(parameter)
    return (now - _dense(before).to(now.device)).cpu()


@torch.no_grad()
def _dense(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded or sparse tensor, in float32 or better."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
