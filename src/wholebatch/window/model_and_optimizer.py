"""The models and optimizers that a window updates, checked before the first step."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wholebatch.distributed import Local, Sync
from wholebatch.errors import OptionError, UnsupportedError, WindowError
from wholebatch.window.close_options import CloseOptions
from wholebatch.window.precision import LossScale, SixteenBit


class Scheduler(Protocol):
    """A scheduler that is stepped once per update: torch's, or anything like them."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Ema(Protocol):
    """An average of the weights, such as torch.optim.swa_utils.AveragedModel."""

    def update_parameters(self, model: nn.Module) -> None: ...


@dataclass(frozen=True)
class Target:
    """The models, their optimizers, and what else moves once per update."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[Scheduler, ...]
    ema: Ema | None
    scale: LossScale | None
    sixteen_bit: SixteenBit
    steps: bool = True
    """False with optimizer=None: the gradients are left to the user, who steps."""
    averaged: nn.Module | None = None
    """The module that the average `ema` is of."""
    sync: Sync = field(default_factory=Local)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        device: torch.device = self.optimizers[0].param_groups[0]["params"][0].device
        return device

    def groups(self) -> list[list[nn.Parameter]]:
        """Return the trainable parameters, by parameter group, as the model holds them now."""
        held = self.sync.in_window
        return [
            [held(parameter) for parameter in group["params"] if parameter.requires_grad]
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    def trained(self) -> list[nn.Parameter]:
        """Return the trainable parameters, as they are now."""
        return [parameter for group in self.groups() for parameter in group]

    def digest(self, options: CloseOptions) -> int:
        """Return a number for what all ranks must share: parameters, rates and clipping.

        Rates count to six digits: machines may round otherwise. Gradients are summed in the
        optimizers' order, which a set of names may have made.
        """
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        settings = [group.get(name) for group in groups for name in ("lr", "weight_decay")]
        settings += [options.clip_norm, options.clip_value]
        places = {id(parameter): place for place, parameter in enumerate(self.trained(), start=1)}
        parameters = [
            # ZeRO 3 leaves nothing in a parameter but its shape.
            (name, tuple(getattr(p, "ds_shape", p.shape)), str(p.dtype), places.get(id(p), 0))
            for name, p in self.all_parameters().items()
        ]
        return zlib.crc32(repr((parameters, [_six_digits(value) for value in settings])).encode())

    def all_parameters(self) -> dict[str, nn.Parameter]:
        """Return the models' parameters and others that are trained, by name ("0.weight")."""
        by_name = {
            name if len(self.models) == 1 else f"{place}.{name}": parameter
            for place, model in enumerate(self.models)
            for name, parameter in model.named_parameters()
        }
        known = set(map(id, by_name.values()))
        beside = ((n, p) for n, p in enumerate(self.trained()) if id(p) not in known)
        return by_name | {f"parameter {n}": parameter for n, parameter in beside}

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable parameters by name; of several models, by place: "0.weight"."""
        names = {id(parameter): name for name, parameter in self.all_parameters().items()}
        return [(names[id(parameter)], parameter) for parameter in self.trained()]

    def name_of(self, parameter: nn.Parameter) -> str:
        return name_of(parameter, self.models)

    def refuse_hooks(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse hooks that would run after every micro-batch, on a part of the gradient."""
        for parameter in () if self.sync.owns_hooks else parameters:
            if parameter._post_accumulate_grad_hooks:
                raise UnsupportedError(
                    f"{self.name_of(parameter)} has a post-accumulate-grad hook: it runs in every "
                    "micro-batch, before the window's gradient is complete (an "
                    "optimizer-in-backward would step on each micro-batch). Remove it; "
                    "close=wb.Close(on_gradient=...) gets the whole gradient"
                )


def build_target(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    *,
    options: CloseOptions,
    scheduler: Scheduler | Sequence[Scheduler] | None = None,
    ema: Ema | None = None,
    precision: str = "full",
    scaler: torch.amp.GradScaler | LossScale | None = None,
    sync: Sync | None = None,
) -> Target:
    """Return everything that a window updates, or raise the error that says why it cannot."""
    sync = Local() if sync is None else sync
    models = tuple(_as_list(model, nn.Module, "model", "an nn.Module"))
    stepped = sync.optimizer(optimizer)
    if stepped is None:
        for name, value in (("scheduler", scheduler), ("ema", ema)):
            if value is not None:
                raise OptionError(
                    f"{name}= with optimizer=None: you make the step, so call it yourself after "
                    "your step"
                )
        stepped = stand_in(models)
    optimizers = tuple(
        _as_list(stepped, torch.optim.Optimizer, "optimizer", "a torch.optim.Optimizer")
    )
    parameters = _check_parameters(optimizers, models)
    _check_belongs(parameters, models)
    for each in optimizers:
        _check_optimizer(each)
    options.check(optimizers)
    if options.clip_value is not None and any(p.is_complex() for p in parameters):
        raise OptionError(
            "clip_value= with complex parameters: a complex number has no order to clamp by; "
            "use clip_norm="
        )
    schedulers = () if scheduler is None else _schedulers(scheduler, optimizers)
    if ema is not None and (
        isinstance(ema, type) or not callable(getattr(ema, "update_parameters", None))
    ):
        raise OptionError(
            f"ema={_kind(ema)}: must have update_parameters(model), as "
            "torch.optim.swa_utils.AveragedModel has"
        )
    averaged = None if ema is None else _averaged(ema, models)
    sync.check(
        precision=precision,
        scaler=scaler,
        ema=ema,
        schedulers=schedulers,
        clips=options.clip_norm is not None or options.clip_value is not None,
    )
    device = parameters[0].device
    if any(parameter.is_meta for parameter in parameters):
        raise UnsupportedError(
            "parameters on the meta device have no values: call model.to_empty(device=...) and "
            "load or initialise the weights first"
        )
    target = Target(
        models=models,
        optimizers=optimizers,
        schedulers=schedulers,
        ema=ema,
        scale=_loss_scale(precision, scaler, device),
        sixteen_bit=SixteenBit(),
        steps=optimizer is not None,
        averaged=averaged,
        sync=sync,
    )
    target.refuse_hooks(target.trained())
    return target


def _averaged(ema: Ema, models: Sequence[nn.Module]) -> nn.Module:
    """Return the module that an average is of: all models, or the one whose parameters it has."""
    if len(models) == 1:
        return models[0]
    whole = nn.ModuleList(models)
    own = getattr(ema, "module", None)
    if not isinstance(own, nn.Module):
        return whole
    shapes = [parameter.shape for parameter in own.parameters()]
    for candidate in (whole, *models):
        if [parameter.shape for parameter in candidate.parameters()] == shapes:
            return candidate
    raise OptionError(
        f"ema= averages {len(shapes)} parameters that are neither those of all {len(models)} "
        "models nor those of one of them: AveragedModel(nn.ModuleList(models))"
    )


def stand_in(models: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """Hold the models' parameters where the user steps them; it is never stepped itself."""
    parameters = {id(p): p for model in models for p in model.parameters()}
    if not parameters:
        raise UnsupportedError("optimizer=None and a model without parameters: nothing to train")
    return torch.optim.SGD(list(parameters.values()), lr=0.0)


def _six_digits(value: Any) -> Any:
    """Return a number, or a list of them, as text; a rate may be kept in a tensor."""
    if isinstance(value, list | tuple):
        return [_six_digits(each) for each in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        value = float(value)
    return f"{value:.6g}" if isinstance(value, Real) else None


class Schedules:
    """The schedulers of the windows: each is stepped once per update, by the window alone."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedulers = schedulers
        self._left_at: list[int | None] = []

    def refuse_stepped(self) -> None:
        """Refuse a scheduler that the loop has stepped once since the last update.

        A loaded state moves it back, or by more than a step.
        """
        for scheduler, before in zip(self._schedulers, self._left_at, strict=False):
            if before is not None and _steps_of(scheduler) == before + 1:
                raise WindowError(
                    f"{type(scheduler).__name__} was stepped by the loop, and scheduler= steps it "
                    "once per update: remove scheduler.step() from the loop, or leave scheduler= "
                    "out and step it yourself wherever a Step is returned"
                )

    def step(self, loss: float) -> None:
        """Step each once; a plateau scheduler gets the window's exact mean loss."""
        for scheduler in self._schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()
        self._left_at = [_steps_of(scheduler) for scheduler in self._schedulers]


def _steps_of(scheduler: Any) -> int | None:
    """Return how often a scheduler was stepped, if it tells."""
    steps = getattr(scheduler, "last_epoch", None)
    return steps if isinstance(steps, int) else None


def _as_list(value: Any, kind: type, name: str, wanted: str) -> list[Any]:
    values = [value] if isinstance(value, kind) else value
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise OptionError(f"{name}={_kind(value)}: must be {wanted} or a list of them")
    for each in values:
        if not isinstance(each, kind):
            raise OptionError(f"{name} holds {_kind(each)}: must be {wanted}")
    return list(values)


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _check_parameters(
    optimizers: Iterable[torch.optim.Optimizer], models: Sequence[nn.Module]
) -> list[nn.Parameter]:
    by_id: dict[int, nn.Parameter] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in by_id:
                    raise UnsupportedError(
                        f"{name_of(parameter, models)} is in two optimizers: each would update "
                        "it; leave it in one"
                    )
                by_id[id(parameter)] = parameter
    parameters = list(by_id.values())
    if not any(parameter.requires_grad for parameter in parameters):
        raise UnsupportedError("every parameter of the optimizer is frozen: nothing to train")
    return parameters


def _check_belongs(parameters: Sequence[nn.Parameter], models: Sequence[nn.Module]) -> None:
    """Refuse an optimizer of another model; allow other parameters beside a frozen model."""
    theirs = {id(p) for model in models for p in model.parameters() if p.requires_grad}
    if theirs and not any(id(parameter) in theirs for parameter in parameters):
        raise UnsupportedError(
            f"none of the optimizer's {len(parameters)} parameters is a trainable parameter of the "
            "model: was the optimizer created for another model, or before layers were replaced, "
            "copied or sharded? Create it from this model's parameters()"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):
        return
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise needs_closure(optimizer)


def needs_closure(optimizer: torch.optim.Optimizer) -> UnsupportedError:
    """Return the error of an optimizer whose step evaluates the loss again."""
    return UnsupportedError(
        f"{type(optimizer).__name__} needs a closure that evaluates the loss again in its step; "
        "pass optimizer=None and let the closure return train.gradient(batch).loss, or use an "
        "optimizer whose step() needs no closure"
    )


def _schedulers(
    scheduler: Scheduler | Sequence[Scheduler], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Scheduler, ...]:
    schedulers = tuple(scheduler) if isinstance(scheduler, Sequence) else (scheduler,)
    ours = [each for o in optimizers for each in (o, *getattr(o, "stands_for", ()))]
    for each in schedulers:
        if isinstance(each, type) or not callable(getattr(each, "step", None)):
            raise OptionError(f"scheduler={_kind(each)}: must have step(), called once per update")
        theirs = getattr(each, "optimizer", None)
        if theirs is not None and not any(theirs is optimizer for optimizer in ours):
            raise OptionError(
                f"scheduler={type(each).__name__}: belongs to an optimizer that is not among "
                "those given; pass the scheduler of this optimizer"
            )
    return schedulers


def _loss_scale(
    precision: str, scaler: torch.amp.GradScaler | LossScale | None, device: torch.device
) -> LossScale | None:
    if isinstance(scaler, LossScale):  # an adapter's, over the scaler of its library
        return scaler
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise OptionError(f"scaler={type(scaler).__name__}: must be a torch.amp.GradScaler")
    if scaler is not None and precision == "bf16":
        raise OptionError(
            f"scaler= with precision={precision!r}: bf16 has the range of fp32 and needs no loss "
            "scaling; leave the scaler out"
        )
    if scaler is None and precision == "fp16":
        scaler = torch.amp.GradScaler(device.type)
    return None if scaler is None or not scaler.is_enabled() else LossScale(scaler, device)


def name_of(parameter: Tensor, models: Iterable[nn.Module]) -> str:
    """Return the name of a parameter or buffer; of several models, with place and class."""
    models = list(models)
    for place, model in enumerate(models):
        for name, candidate in (*model.named_parameters(), *model.named_buffers()):
            if candidate is parameter:
                return name if len(models) == 1 else f"{name} of {type(model).__name__} ({place})"
    return f"a tensor of shape {tuple(parameter.shape)}"
