"""The close of a window: one factor (normalise × unscale × clip), and the check for inf and NaN.

The gradients of a window arrive as `seed × sum of d(total)`, where the seed is the provisional
scale (with the loss scale in it). The gradient that the optimizer must see is
`sum of d(total) / units`, clipped. Both differ by one number:

    normalise = 1 / (units × seed)
    norm      = ‖gradients as they are‖ × normalise
    clip      = min(1, clip_norm / norm)
    factor    = normalise × clip

All of them are scalars on the device, and the gradients are multiplied once. The optimizers step
after the host has read that the gradient is finite.

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
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from wholebatch.distributed import Sync
from wholebatch.errors import LossError, OptionError, WindowError
from wholebatch.window.close_options import ClipNorm, CloseOptions
from wholebatch.window.model_and_optimizer import Target
from wholebatch.window.precision import SIXTEEN_BIT


class Holder(Protocol):
    """A holder of a gradient: a parameter, or an engine's slice of some."""

    grad: Tensor | None


class Closed(NamedTuple):
    """The norm and the clip factor of a window's gradient, and True if it may be used; tensors."""

    norm: Tensor
    clip: Tensor
    is_valid: Tensor


@torch.no_grad()
def close_gradients(
    groups: Sequence[Sequence[Holder]],
    normalise: Tensor,
    is_valid: Tensor,
    options: CloseOptions,
    hooks: DeferredHooks,
    *,
    total_norm: Callable[[Sequence[Tensor]], Tensor],
) -> Closed:
    """Normalise and clip the gradients of a window for the optimizer.

    `normalise` is the factor from the gradients as they are to those of the mean loss, and
    `is_valid` True if the losses are finite and the units allow a mean.

    Norm, clip and factor stay on the device, and the gradients are multiplied once. A gradient that
    is not valid stays as it is.

    The hooks on parameters and then `on_gradient` see complete, normalised gradients, as they would
    for the undivided batch. `on_gradient` is called for a valid gradient only: it could hide that
    another one was not finite.
    """
    is_normalised = False
    gradients = [dense_gradients(group) for group in groups]
    if hooks:
        _multiply(_flat(gradients), torch.where(is_valid, normalise, 1.0))
        normalise, is_normalised = torch.ones_like(normalise), True
    if hooks.taken:
        hooks.run()
        gradients = [dense_gradients(group) for group in groups]
    if hooks.calls:
        norm = torch.linalg.vector_norm(_norms(gradients, options.clip_norm, total_norm))
        if not bool(is_valid & norm.isfinite().to(is_valid.device)):
            return Closed(norm, torch.ones_like(norm), torch.zeros_like(is_valid))
        hooks.call()
        gradients = [dense_gradients(group) for group in groups]
    norms = _norms(gradients, options.clip_norm, total_norm).to(normalise.device)
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
) -> Tensor:
    """Return one norm over all, or one per group where groups are clipped separately."""
    sets = gradients if isinstance(clip_norm, Sequence) else [_flat(gradients)]
    return torch.stack([norm_of(group).double() for group in sets])


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
        self.parameters = parameters
        stepped = [p for p in self.sync.stepped(parameters) if p.dtype in SIXTEEN_BIT]
        if stepped and not self.sync.owns_step:  # the engine keeps sums of its own
            self.target.sixteen_bit.begin(stepped)
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

    def update(self) -> None:
        """Step the optimizers."""
        try:
            if self.target.sixteen_bit.parameters:
                self.target.sixteen_bit.round_once()
            for optimizer in self.target.optimizers:
                self.step(optimizer)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"the optimizer's step ran out of memory ({error}), and may have changed "
                "parameters or optimizer state already: load the model and the optimizer from the "
                'last checkpoint. wb.Memory(optimizer_state="host") keeps the state in host memory'
            ) from None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer once."""
        optimizer.step()

    def discard(self) -> None:
        """End the window and release its gradients."""
        for parameter in (*self.parameters, *self.sync.stepped(self.parameters)):
            parameter.grad = None
        self.parameters = []
        if self.target.sixteen_bit.parameters:
            self.target.sixteen_bit.end()
