"""The close of a window: one factor (normalise × unscale × clip), and the check for inf and NaN.

The gradients of a window arrive as `seed × sum of d(total)`, where the seed is the provisional
scale (with the loss scale in it). The gradient that the optimizer must see is
`sum of d(total) / units`, clipped. Both differ by one number:

    normalise = 1 / (units × seed)
    norm      = ‖gradients as they are‖ × normalise
    clip      = min(1, clip_norm / norm)
    factor    = normalise × clip

All of them are scalars on the device, and the gradients are multiplied once. A fused Adam or SGD
takes from a tensor (`found_inf`) whether to step at all, so it steps before the host has read it.
Any other optimizer steps after the host has read that the gradient is finite.

`Store` holds the gradients of the open window and steps from them; `wholebatch.offload` steps from
another place.

The user's own code sees the whole gradient before it is clipped. A hook on a
parameter (`parameter.register_hook`) may clip, mask or add noise: run on every micro-batch it would
be another function, unless it is linear. So a window takes the hooks off and runs them at its
close, then `on_gradient=`, then clips: the order of a plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wholebatch.distributed import Sync
from wholebatch.errors import LossError, OptionError, WindowError
from wholebatch.window.close_options import ClipNorm, CloseOptions
from wholebatch.window.model_and_optimizer import Target, needs_closure
from wholebatch.window.replaced_attributes import replaced_attributes


class Holder(Protocol):
    """A holder of a gradient: a parameter, or an engine's slice of some."""

    grad: Tensor | None


@dataclass(frozen=True)
class Sums:
    """The sums of a window's losses, one for each term in the order of `weights`.

    They are float64 tensors on the device of the gradients.
    """

    weights: Mapping[str, float]
    own_totals: list[Tensor]
    """Those of this rank's micro-batches, of each term."""
    own_units: list[Tensor]
    totals: Tensor
    """The sums over the micro-batches and all ranks."""
    units: Tensor
    is_valid: Tensor
    """True if the losses are finite and the units allow a mean."""
    normalise: Tensor
    """The factor from the gradients as they are to those of the mean loss."""


class Closed(NamedTuple):
    """The norm and the clip factor of a window's gradient, and True if it may be used; tensors."""

    norm: Tensor
    clip: Tensor
    is_valid: Tensor


@torch.no_grad()
def close_gradients(
    groups: Sequence[Sequence[Holder]],
    sums: Sums,
    options: CloseOptions,
    hooks: DeferredHooks,
    *,
    total_norm: Callable[[Sequence[Tensor]], Tensor],
    waits: bool,
) -> Closed:
    """Normalise and clip the gradients of a window for the optimizer.

    Norm, clip and factor stay on the device, and the gradients are multiplied once. A gradient that
    is not valid stays as it is. With `waits` the norm is computed again in float64 if it has
    overflowed; otherwise nothing waits for the device.

    The hooks on parameters and then `on_gradient` see complete, normalised gradients, as they would
    for the undivided batch. `on_gradient` is called for a valid gradient only: it could hide that
    another one was not finite.
    """
    normalise, is_valid = sums.normalise, sums.is_valid
    is_normalised = False
    gradients = [dense_gradients(group) for group in groups]
    if hooks:
        _multiply(_flat(gradients), torch.where(is_valid, normalise, 1.0))
        normalise, is_normalised = torch.ones_like(normalise), True
    if hooks.taken:
        hooks.run()
        gradients = [dense_gradients(group) for group in groups]
    if hooks.calls:
        norm = torch.linalg.vector_norm(_norms(gradients, options.clip_norm, total_norm, waits))
        if not bool(is_valid & norm.isfinite().to(is_valid.device)):
            return Closed(norm, torch.ones_like(norm), torch.zeros_like(is_valid))
        hooks.call()
        gradients = [dense_gradients(group) for group in groups]
    norms = _norms(gradients, options.clip_norm, total_norm, waits).to(normalise.device)
    norms = norms * normalise
    norm = torch.linalg.vector_norm(norms)
    is_valid = is_valid & norm.isfinite()
    limits = options.clip_norm if isinstance(options.clip_norm, Sequence) else [options.clip_norm]
    clips = [
        torch.ones_like(norm) if limit is None else (limit / (part + 1e-6)).clamp(max=1.0)
        for limit, part in zip(limits, norms.unbind(), strict=True)
    ]
    if not is_normalised or options.clip_norm is not None:
        sets = gradients if len(clips) > 1 else [_flat(gradients)]
        for alike, clip in zip(sets, clips, strict=True):
            _multiply(alike, torch.where(is_valid, normalise * clip, 1.0))
    if options.clip_value is not None:
        # In float64: torch.where makes float32 of two Python numbers.
        most = scalar_on(is_valid.device, options.clip_value, torch.float64)
        limit = torch.where(is_valid, most, math.inf)
        for gradient in local_parts(_flat(gradients)):
            here = limit.to(gradient.device, gradient.dtype)
            gradient.clamp_(-here, here)
    return Closed(norm, torch.stack(clips).min(), is_valid)


def column(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return numbers and 0-dim tensors as one float64 tensor on the device."""
    if not any(issubclass(kind, Tensor) for kind in set(map(type, values))):
        return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)
    tensors = [value for value in values if isinstance(value, Tensor)]
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(tensors) == len(values) and len(kinds) == 1:
        return torch.stack(tensors).to(device, torch.float64)
    return torch.stack([scalar_on(device, value, torch.float64) for value in values])


class Reading:
    """Copies tensors of one device to the host, without waiting for its later work."""

    def __init__(self, *tensors: Tensor) -> None:
        flat = torch.cat([tensor.flatten().double() for tensor in tensors])
        self._lengths = [tensor.numel() for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        self._host = flat
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(flat.device))

    def wait(self) -> list[list[float]]:
        """Return the numbers of each tensor."""
        if self._event is not None:
            self._event.synchronize()
        return [part.tolist() for part in self._host.split(self._lengths)]


def read_scalars(values: Sequence[Tensor | float]) -> list[float]:
    """Return numbers and 0-dim tensors as floats, with one transfer for each device."""
    result: list[float] = []
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            kinds.setdefault((value.device, value.dtype), []).append(index)
            result.append(0.0)
        else:
            result.append(float(value))
    for indices in kinds.values():
        stacked = torch.stack([cast("Tensor", values[index]) for index in indices])
        for index, number in zip(indices, stacked.tolist(), strict=True):
            result[index] = float(number)
    return result


def scalar_on(device: torch.device, value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return a number as a tensor there. It is filled in: a copy would wait for the device."""
    if isinstance(value, Tensor):
        return value.to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)


def power_of_two_near(value: float) -> float:
    """Return the nearest power of two: a product with it is never rounded."""
    return float(2.0 ** round(math.log2(value)))


def check_counts(known: Mapping[str, float], returned: Mapping[str, float]) -> None:
    """Refuse losses that returned other units than were counted before the first backward."""
    for name, counted in known.items():
        if not math.isclose(counted, returned[name], rel_tol=1e-6):
            what = f" of term {name!r}" if len(known) > 1 else ""
            raise LossError(
                f"units= counted {counted:g} units{what} in this window, but the losses "
                f"returned {returned[name]:g}: both must count the same thing"
            )


def dense_gradients(parameters: Iterable[Holder]) -> list[Tensor]:
    """Return the gradients as dense real tensors that share memory with `.grad`."""
    dense = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            if not gradient.is_coalesced():
                gradient = parameter.grad = gradient.coalesce()
            gradient = gradient.values()
        elif gradient.is_conj():  # a conjugate that is not written out has no real view
            gradient = parameter.grad = gradient.resolve_conj()
        dense.append(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
    return dense


def _flat(gradients: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    return [gradient for group in gradients for gradient in group]


def local_parts(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's slices of DTensors, whose meshes may differ: for element-wise work."""
    return [each.to_local() if hasattr(each, "to_local") else each for each in gradients]


def _multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in local_parts(gradients):
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), alike in kinds.items():
        if dtype.itemsize >= 4:
            torch._foreach_mul_(alike, factor.to(device, dtype))
            continue
        for gradient in alike:  # the factor itself would be rounded to 16 bits
            gradient.copy_(gradient.float() * factor.to(device, torch.float32))


def _norms(
    gradients: Sequence[Sequence[Tensor]],
    clip_norm: ClipNorm,
    norm_of: Callable[[Sequence[Tensor]], Tensor],
    waits: bool,
) -> Tensor:
    """Return one norm over all, or one per group where groups are clipped separately."""
    sets = gradients if isinstance(clip_norm, Sequence) else [_flat(gradients)]
    as_computed = [norm_of(group) for group in sets]
    norms = torch.stack([norm.double() for norm in as_computed])
    if not waits or as_computed[0].dtype is torch.float64 or bool(norms.isfinite().all()):
        return norms
    # Finite fp32 gradients above 1e19 overflow when squared.
    in_float64 = [[norm_of([g.double()]) for g in group] or [norms[0] * 0] for group in sets]
    return torch.stack([torch.linalg.vector_norm(torch.stack(group)) for group in in_float64])


OnGradient: TypeAlias = Callable[[list[tuple[str, nn.Parameter]]], None]
"""Called with the names and parameters whose `.grad` is the whole gradient of the window."""


class DeferredHooks:
    """The hooks that were taken off the parameters of an open window, and `on_gradient`.

    `named()` gives the names and parameters that `on_gradient` is called with.
    """

    def __init__(
        self,
        on_gradient: OnGradient | None = None,
        named: Callable[[], list[tuple[str, nn.Parameter]]] = list,
    ) -> None:
        if on_gradient is not None and not callable(on_gradient):
            raise OptionError(
                f"on_gradient={on_gradient!r}: must be a function of a list of (name, parameter)"
            )
        self._on_gradient = on_gradient
        self._named = named
        self._taken: list[tuple[nn.Parameter, Mapping[int, Any]]] = []

    def __bool__(self) -> bool:
        return self.taken or self.calls

    @property
    def taken(self) -> bool:
        """True if a parameter of the window has hooks."""
        return bool(self._taken)

    @property
    def calls(self) -> bool:
        return self._on_gradient is not None

    @torch.no_grad()
    def call(self) -> None:
        """Call `on_gradient` with the parameters that have a gradient."""
        assert self._on_gradient is not None
        self._on_gradient([(name, p) for name, p in self._named() if p.grad is not None])

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            hooks = parameter._backward_hooks
            if hooks:
                parameter._backward_hooks = None
                self._taken.append((parameter, hooks))

    def refuse_added(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse a hook that was added to a parameter of the open window."""
        if any(parameter._backward_hooks for parameter in parameters):
            raise WindowError(
                "a hook was added to a parameter in the middle of the window, and has seen the "
                "gradients of single micro-batches: call register_hook() between windows, where "
                "backward() has returned a Step"
            )

    def run(self) -> None:
        """Call each hook in its order on the whole, normalised gradient, as autograd would."""
        for parameter, hooks in self._taken:
            for hook in list(hooks.values()):
                if parameter.grad is None:
                    break
                replaced = hook(parameter.grad)
                if replaced is not None:
                    parameter.grad = replaced

    def give_back(self) -> None:
        for parameter, hooks in self._taken:
            parameter._backward_hooks = hooks  # type: ignore[assignment]
        self._taken.clear()


Groups: TypeAlias = Sequence[Sequence[nn.Parameter]]
"""The parameters that are trained, by parameter group."""


@dataclass(frozen=True)
class Handover:
    """How a window leaves its gradients to a user, or to a library that makes the step."""

    lends: bool = False
    """True if they may be written again by the next window: they are cleared before it."""
    counts: bool = False
    """True if each of them is counted as an update."""
    stray: str = (
        "already holds a gradient that this window did not make, and it would be added. If your "
        "code calls loss.backward(), remove it: the window runs the backward pass. After "
        "gradient(), or if the gradient is from before the loop, call optimizer.zero_grad()"
    )
    """The end of the error message for gradients that are there before the first backward."""


class Store:
    """The gradients of an open window in `.grad`, and the update from them."""

    steps_at_once: bool = True
    """True if one step of the optimizer updates all parameters."""
    opened: Callable[[], None] | None = None
    """Called when a window opens, before there is a gradient."""

    def __init__(
        self,
        target: Target,
        options: CloseOptions,
        sync: Sync,
        handover: Handover | None = None,
    ) -> None:
        self.handover = handover or Handover()
        self.target = target
        self.options = options
        self.sync = sync
        self.parameters: list[nn.Parameter] = []
        self._spoiled: list[tuple[nn.Parameter, int]] = []
        """Parameters of a window that failed in its update, with their versions."""

    # Open window

    def refuse_stray(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse gradients that the window has not made, and would add to."""
        holders = [parameter for parameter in parameters if parameter.grad is not None]
        if not holders:
            return
        dirty = read_scalars([part.any() for part in local_parts(dense_gradients(holders))])
        for parameter, is_dirty in zip(holders, dirty, strict=True):
            if is_dirty:
                raise WindowError(f"{self.target.name_of(parameter)} {self.handover.stray}")
        for parameter in holders:
            parameter.grad = None

    def begin(self, parameters: list[nn.Parameter]) -> None:
        """Begin a window; no parameter may hold a gradient."""
        if any(parameter._version == version for parameter, version in self._spoiled):
            raise WindowError(
                "an earlier window failed when some of its parameters may have been updated: load "
                "the model and the optimizer from the last checkpoint before going on"
            )
        self._spoiled = []
        self.parameters = parameters
        if self.target.sixteen_bit.parameters:
            self.target.sixteen_bit.begin()
        if self.opened is not None:
            self.opened()

    def refuse_nothing(self) -> None:
        """Refuse a window without any gradient."""
        if self.sync.has_whole_gradient and all(
            p.grad is None for p in self.sync.stepped(self.parameters)
        ):
            raise WindowError(
                "the losses of this window lead to none of the optimizer's parameters, so there is "
                "nothing to update: was the optimizer made for another model, or before its layers "
                "were replaced or copied?"
            )

    # Close

    def can_step_unread(self, hooks: DeferredHooks) -> bool:
        """True if the optimizers read from a tensor (`found_inf`) whether to step."""
        return (
            self.steps_at_once
            and self.sync.has_whole_gradient
            and not hooks
            and not self.target.sixteen_bit.parameters
            and self.target.device.type in _DEVICES_TO_WAIT_FOR
            and not _global_optimizer_pre_hooks
            and not _global_optimizer_post_hooks
            and all(map(_steps_by_found_inf, self.target.optimizers))
        )

    def close(self, groups: Groups, sums: Sums, hooks: DeferredHooks, *, waits: bool) -> Closed:
        """Normalise and clip the gradients for the optimizer (see `close_gradients`)."""
        holders, total_norm = self.sync.holders(groups), self.sync.norm
        return close_gradients(
            holders, sums, self.options, hooks, total_norm=total_norm, waits=waits
        )

    def check_hand_over(self) -> None:
        """Refuse to leave the gradients to the user if a step of theirs could not use them."""
        if self.sync.owns_step:
            raise WindowError(
                "gradient() with a DeepSpeed engine: it steps its own optimizer; use step()"
            )

    @torch.no_grad()
    def hand_over(self) -> None:
        """Leave the gradients to the user, in `.grad` and in the parameters' own dtype.

        They are new tensors, unless the handover `lends` the store's own: a compiled micro-step
        writes into those in every window.
        """
        self.target.sixteen_bit.round_once()
        for parameter in () if self.handover.lends else self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self.parameters = []

    # Update

    def update(self, found_inf: Tensor | None = None) -> None:
        """Step the optimizers; if memory runs out, raise an error that says what to do.

        Optimizers that read `found_inf` on the device change nothing if it is 1.
        """
        try:
            if self.target.sixteen_bit.parameters:
                self.target.sixteen_bit.round_once()
            for optimizer in self.target.optimizers:
                self.step(optimizer, found_inf)
            return
        except torch.OutOfMemoryError as error:
            failure = str(error)  # the text only: a traceback keeps what was allocated alive
        self._spoil(failure)

    def step(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
        """Step an optimizer once."""
        if found_inf is None:
            _step_without_closure(optimizer)
            return
        with replaced_attributes(optimizer, found_inf=found_inf):
            optimizer.step()

    def _spoil(self, failure: str) -> NoReturn:
        """Mark the parameters as half updated, and say so."""
        self._spoiled = [(parameter, parameter._version) for parameter in self.parameters]
        reason = failure.strip().partition("\n")[0] or "no reason given"
        raise torch.OutOfMemoryError(
            f"the optimizer's step ran out of memory ({reason}), and may have changed parameters "
            "or optimizer state already: load the model and the optimizer from the last "
            "checkpoint before going on. fused=True makes no copies of the gradients, "
            'wb.Memory(optimizer_state="host") keeps the state in host memory, and a smaller '
            "micro-batch leaves more free memory"
        )

    def discard(self) -> None:
        """End the window and release its gradients."""
        for parameter in (*self.parameters, *self.sync.stepped(self.parameters)):
            parameter.grad = None
        self.parameters = []
        if self.target.sixteen_bit.parameters:
            self.target.sixteen_bit.end()


def _step_without_closure(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer; say what to do with one that needs a closure, such as SAM."""
    try:
        optimizer.step()
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        text = str(error)
        if "closure" in text or "'NoneType' object is not callable" in text:
            raise needs_closure(optimizer) from error
        raise


_DEVICES_TO_WAIT_FOR = ("cuda",)


def _steps_by_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """True for a fused Adam or SGD: where `found_inf` is 1, it leaves all as it is.

    The first step of an SGD with momentum would leave its new buffers without a value.
    """
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
        and type(optimizer.param_groups[0]["params"][0].data) is Tensor  # not a shard
        and all(group.get("fused") for group in optimizer.param_groups)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and user_code_in_step(optimizer) is None
        and all(
            optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
            for group in optimizer.param_groups
            if group.get("momentum")
            for parameter in group["params"]
            if parameter.grad is not None
        )
    )


def user_code_in_step(optimizer: torch.optim.Optimizer) -> str | None:
    """Name what the user has added to the optimizer's step, or None.

    torch's schedulers replace the step of an optimizer by code of torch's own.
    """
    for where, hooks in (
        ("a step pre-hook", optimizer._optimizer_step_pre_hooks),
        ("a step pre-hook for all optimizers", _global_optimizer_pre_hooks),
    ):
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("wholebatch."):
                return where
    replaced = vars(optimizer).get("step")
    home = getattr(replaced, "__globals__", {}).get("__name__", "")
    if replaced is not None and not str(home).startswith("torch."):
        return "a step() that was replaced"
    return None
