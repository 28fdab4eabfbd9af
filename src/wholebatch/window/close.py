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

The user's own code sees the whole gradient before it is clipped. A hook on a parameter
(`parameter.register_hook`) may clip, mask or add noise: run on every micro-batch it would be
another function, unless it is linear. So a window takes the hooks off and runs them at its close,
then `on_gradient=`, then clips: the order of a plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from wholebatch.errors import LossError, OptionError, WindowError

ClipNorm: TypeAlias = float | Sequence[float | None] | None
Policy: TypeAlias = Literal["raise", "skip"]


class Holder(Protocol):
    """A holder of a gradient: a parameter, or an engine's slice of some."""

    grad: Tensor | None


@dataclass(frozen=True)
class CloseOptions:
    """Options of the close; impossible values are refused at construction."""

    clip_norm: ClipNorm = None
    clip_value: float | None = None
    nonfinite: Policy = "raise"
    zero_units: Policy = "raise"

    def __post_init__(self) -> None:
        clip = self.clip_norm
        plain = [_plain(one) for one in clip] if isinstance(clip, list | tuple) else _plain(clip)
        object.__setattr__(self, "clip_norm", plain)
        object.__setattr__(self, "clip_value", _plain(self.clip_value))

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse what is impossible with these optimizers."""
        if self.clip_norm is not None and self.clip_value is not None:
            raise OptionError(
                "clip_norm= and clip_value= together: give one (the order of two would matter)"
            )
        groups = sum(len(optimizer.param_groups) for optimizer in optimizers)
        clip = self.clip_norm
        norms: Sequence[object] = clip if isinstance(clip, list | tuple) else [clip]
        if norms is clip and len(norms) != groups:
            raise OptionError(
                f"clip_norm={norms!r}: {len(norms)} values for {groups} parameter groups; give one "
                "number for all, or one (or None) for each group"
            )
        for norm in norms:
            _check_positive("clip_norm", norm)
        _check_positive("clip_value", self.clip_value)
        for name in ("nonfinite", "zero_units"):
            if getattr(self, name) not in ("raise", "skip"):
                raise OptionError(f"{name}={getattr(self, name)!r}: must be 'raise' or 'skip'")


def _plain(value: Any) -> Any:
    """Return a Python number: one of NumPy's would round what it is divided by."""
    odd = isinstance(value, Real) and not isinstance(value, int | float)
    return float(value) if odd else value


def _check_positive(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(f"{name}={value!r}: must be a positive number, or None for no clipping")


@dataclass(frozen=True)
class Sums:
    """The sums of a window's losses over its micro-batches and all ranks, one for each term.

    They are float64 tensors on the device of the gradients.
    """

    totals: Tensor
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
        torch.ones_like(norm) if limit is None else (limit / (one + 1e-6)).clamp(max=1.0)
        for limit, one in zip(limits, norms.unbind(), strict=True)
    ]
    if not is_normalised or options.clip_norm is not None:
        sets = gradients if len(clips) > 1 else [_flat(gradients)]
        for alike, clip in zip(sets, clips, strict=True):
            _multiply(alike, torch.where(is_valid, normalise * clip, 1.0))
    if options.clip_value is not None:
        limit = torch.where(is_valid, normalise.new_full((), options.clip_value), math.inf)
        for gradient in local_parts(_flat(gradients)):
            here = limit.to(gradient.device, gradient.dtype)
            gradient.clamp_(-here, here)
    return Closed(norm, torch.stack(clips).min(), is_valid)


def column(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return numbers and 0-dim tensors as one float64 tensor on the device."""
    if not any(isinstance(value, Tensor) for value in values):
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


def check_terms(known: Mapping[str, float] | None, terms: Mapping[str, object]) -> None:
    """Refuse terms whose units were not counted before the first backward."""
    if known is None:
        raise LossError(
            f"a loss of several terms ({', '.join(terms)}): each term is divided by its own units "
            "over the window, which must be known before the first backward. Pass "
            "WholeBatch(units=), a function that counts the units of each term in a micro-batch; "
            "in your own loop, call Accumulator.announce({term: units}) before the window's "
            "first backward"
        )
    if known.keys() != terms.keys():
        raise LossError(
            f"units= counts the terms {sorted(known)}, but the loss has the terms "
            f"{sorted(terms)}: they must be the same"
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
        dense.append(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
    return dense


def _flat(gradients: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    return [gradient for group in gradients for gradient in group]


def local_parts(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's slices of DTensors, whose meshes may differ: for element-wise work."""
    return [one.to_local() if hasattr(one, "to_local") else one for one in gradients]


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
    found = [norm_of(group) for group in sets]
    norms = torch.stack([norm.double() for norm in found])
    if not waits or found[0].dtype is torch.float64 or bool(norms.isfinite().all()):
        return norms
    # Finite fp32 gradients above 1e19 overflow when squared.
    in_float64 = [[norm_of([one.double()]) for one in group] or [norms[0] * 0] for group in sets]
    return torch.stack([torch.linalg.vector_norm(torch.stack(group)) for group in in_float64])


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
