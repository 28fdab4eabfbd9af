"""The close of a window: one factor (normalise × unscale × clip), and what is not finite.

The gradients of a window arrive as `seed × sum of d(total)`, where the seed is the provisional
scale (with the loss scale in it). The gradient that the optimizer must see is
`sum of d(total) / units`, clipped. Both differ by one number:

    normalise = 1 / (units × seed)
    norm      = ‖gradients as they are‖ × normalise
    clip      = min(1, clip_norm / norm)
    factor    = normalise × clip

A fused optimizer multiplies by it inside its own kernel (`grad_scale`), so that no pass over the
gradients is made. Elsewhere it is one `_foreach_mul_`, as where code of the user's in the step (a
pre-hook, a subclass, a step that was replaced) would find `.grad` without the factor.

The user's own code sees the whole gradient before it is clipped. A hook on a parameter
(`parameter.register_hook`) may clip, mask or add noise: run on every micro-batch it would be
another function, unless it is linear. So a window takes the hooks off and runs them at its close,
then `on_gradient=`, then clips: the order of a plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from wholebatch.errors import LossError, OptionError
from wholebatch.window.forward_state import replaced_attributes

if TYPE_CHECKING:
    from wholebatch.window.window import OpenWindow

ClipNorm: TypeAlias = float | Sequence[float | None] | None
Policy: TypeAlias = Literal["raise", "skip"]
Lent: TypeAlias = Callable[[nn.Parameter], AbstractContextManager[None]]


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
        norms = self.clip_norm if isinstance(self.clip_norm, Sequence) else [self.clip_norm]
        if norms is self.clip_norm and len(norms) != groups:
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
class Closed:
    """The norm of the gradients, and the factor that the optimizer still has to apply."""

    norm: float
    clip: float
    finite: bool
    remaining: float = 1.0
    stepped: bool = False
    """True if the optimizers have stepped already."""


def close_gradients(
    groups: Sequence[Sequence[Holder]],
    optimizers: Sequence[torch.optim.Optimizer],
    options: CloseOptions,
    normalise: float,
    hooks: DeferredHooks,
    *,
    total_norm: Callable[[Sequence[Tensor]], Tensor],
    in_place: bool = False,
    lent: Lent | None = None,
) -> Closed:
    """Bring the gradients of a window to what the optimizer must see.

    The hooks on parameters and then `on_gradient` see complete, normalised gradients, as they would
    for the undivided batch. `on_gradient` is called for a finite gradient only: it could hide that
    another one was not. `in_place` forces the factor into the gradients. `lent`: see
    `DeferredHooks.run`.
    """
    gradients = [dense_gradients(group) for group in groups]
    if hooks:
        _multiply(_flat(gradients), normalise)
        normalise = 1.0
    if hooks.taken:
        hooks.run(lent)
        gradients = [dense_gradients(group) for group in groups]
    if hooks.calls:
        norm = math.hypot(*_norms(gradients, options.clip_norm, total_norm))
        if not math.isfinite(norm):
            return Closed(norm=norm, clip=1.0, finite=False)
        hooks.call()
        gradients = [dense_gradients(group) for group in groups]
    raw_norms = _norms(gradients, options.clip_norm, total_norm)
    norms = [raw * normalise for raw in raw_norms]
    norm = math.hypot(*norms)
    if not math.isfinite(norm):
        return Closed(norm=norm, clip=1.0, finite=False)

    limits = options.clip_norm if isinstance(options.clip_norm, Sequence) else [options.clip_norm]
    clips = [
        1.0 if limit is None else min(1.0, limit / (norm_of_group + 1e-6))
        for limit, norm_of_group in zip(limits, norms, strict=True)
    ]
    in_kernel = not in_place and all(takes_grad_scale(optimizer) for optimizer in optimizers)
    return _scaled(gradients, normalise, clips, options.clip_value, norm, in_kernel)


def _scaled(
    gradients: Sequence[Sequence[Tensor]],
    normalise: float,
    clips: Sequence[float],
    clip_value: float | None,
    norm: float,
    in_kernel: bool,
) -> Closed:
    """Multiply the gradients by their factor, or leave that to the optimizer's kernel."""
    if len(clips) > 1:
        for group, clip in zip(gradients, clips, strict=True):
            _multiply(group, normalise * clip)
        return Closed(norm=norm, clip=min(clips), finite=True)
    factor, flat = normalise * clips[0], _flat(gradients)
    if clip_value is not None:
        _multiply(flat, factor)
        torch._foreach_clamp_max_(_local(flat), clip_value)
        torch._foreach_clamp_min_(_local(flat), -clip_value)
        return Closed(norm=norm, clip=1.0, finite=True)
    if in_kernel:
        return Closed(norm=norm, clip=clips[0], finite=True, remaining=factor)
    _multiply(flat, factor)
    return Closed(norm=norm, clip=clips[0], finite=True)


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
            f"a loss of several terms ({', '.join(terms)}) in a stream: each term is divided by "
            "its own units over the window, which must be known before the first backward; use "
            "WholeBatch with units=, a function of the micro-batch that counts the units of each "
            "term, or Accumulator.announce({term: units}) before a window's first backward"
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
            gradient = gradient._values()
        dense.append(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
    return dense


def _flat(gradients: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    return [gradient for group in gradients for gradient in group]


def _local(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's slices of DTensors, whose meshes may differ: for element-wise work."""
    return [one.to_local() if hasattr(one, "to_local") else one for one in gradients]


@torch.no_grad()
def _multiply(gradients: Sequence[Tensor], factor: float) -> None:
    if gradients and factor != 1.0:
        torch._foreach_mul_(_local(gradients), factor)


def _norms(
    gradients: Sequence[Sequence[Tensor]],
    clip_norm: ClipNorm,
    norm_of: Callable[[Sequence[Tensor]], Tensor],
) -> list[float]:
    """Return one norm over all, or one per group where groups are clipped separately."""
    sets = gradients if isinstance(clip_norm, Sequence) else [_flat(gradients)]
    raw = [norm_of(group) for group in sets]
    return [
        norm
        if math.isfinite(norm) or was.dtype is torch.float64
        # Finite fp32 gradients above 1e19 overflow when squared.
        else math.hypot(*read_scalars([norm_of([gradient.double()]) for gradient in group]))
        for norm, was, group in zip(read_scalars(raw), raw, sets, strict=True)
    ]


@contextmanager
def stepping(optimizer: torch.optim.Optimizer, remaining: float) -> Iterator[None]:
    """Let `optimizer.step()` multiply the gradients by `remaining` in its own kernel."""
    if remaining == 1.0:
        yield
        return
    device = optimizer.param_groups[0]["params"][0].device
    scale = torch.full((), 1.0 / remaining, dtype=torch.float32, device=device)
    with replaced_attributes(optimizer, grad_scale=scale):
        yield


def takes_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer multiplies by a float32 factor in its kernel.

    Code of the user's in the step would read `.grad` without the factor: then it goes in first.
    """
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and is_torchs(optimizer)
        and foreign_code(optimizer) is None
        and all(
            group.get("fused")
            and all(
                parameter.grad is None
                or (parameter.grad.dtype is torch.float32 and type(parameter.grad) is Tensor)
                for parameter in group["params"]
            )
            for group in optimizer.param_groups
        )
    )


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for a class of torch.optim whose step is torch's own."""
    kind: Any = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and all(
        map(_is_torchs_code, _layers(kind.step))
    )


def foreign_code(optimizer: torch.optim.Optimizer) -> str | None:
    """Name what the user has added to the optimizer's step, which may read `.grad`; or None.

    torch's schedulers wrap the step of an optimizer in code of torch's. Hooks of this package know
    where the factor is.
    """
    for where, hooks in (
        ("a step pre-hook", optimizer._optimizer_step_pre_hooks),
        ("a step pre-hook for all optimizers", _global_optimizer_pre_hooks),
    ):
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("wholebatch."):
                return where
    replaced = vars(optimizer).get("step")
    if replaced is not None:
        kind: Any = type(optimizer)
        own = list(_layers(kind.step))
        if not all(layer in own or _is_torchs_code(layer) for layer in _layers(replaced)):
            return "a step() that was replaced"
    return None


def _layers(function: Any) -> Iterator[Any]:
    """Yield the function and all that it wraps, from the outside in."""
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_torchs_code(function: Any) -> bool:
    home = getattr(function, "__globals__", {}).get("__name__", "")
    return str(home).startswith("torch.")


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

    def run(self, lent: Lent | None = None) -> None:
        """Call each hook in its order on the whole, normalised gradient, as autograd would.

        Within `lent(parameter)` a gradient that is kept elsewhere is in the parameter's `.grad`.
        """
        for parameter, hooks in self._taken:
            with nullcontext() if lent is None else lent(parameter):
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


@torch.no_grad()
def close_ahead(
    window: OpenWindow,
    optimizers: Sequence[torch.optim.Optimizer],
    options: CloseOptions,
    *,
    total_norm: Callable[[Sequence[Tensor]], Tensor],
    while_waiting: Callable[[], object] | None = None,
) -> Closed | None:
    """Compute norm, factor and step on the device; None where the close on the host must decide.

    A close on the host reads the units, then the norm, and only then starts the optimizer's step:
    the device has nothing to do meanwhile. A fused optimizer takes its factor, and whether to step
    at all, from tensors. So the device does the arithmetic of `close_gradients`, in the same order
    and in float64, and the step after it, while the host reads the window's numbers. If it must not
    step (something is not finite, there are no units, or they are not those that were counted), it
    leaves everything as it was.

    `while_waiting` runs on the host while the device steps.
    """
    gradients = [gradient for group in window.groups for gradient in dense_gradients(group)]
    if not gradients:
        return None
    device = gradients[0].device
    names = sorted(window.totals)
    totals = [_column(window.totals[name], device) for name in names]
    units = [_column(window.units[name], device) for name in names]
    seed = scalar_on(device, window.seed, torch.float64)
    normalise, good = _normalise(window, names, totals, units, seed)
    norm = total_norm(gradients).double() * normalise
    clip = torch.ones_like(norm)
    if options.clip_norm is not None:
        assert not isinstance(options.clip_norm, Sequence)
        limit = torch.full_like(norm, options.clip_norm)
        clip = (limit / (norm + 1e-6)).clamp(max=1.0)
    bad = (good & norm.isfinite()).logical_not()

    columns = [torch.stack([norm, clip, bad.double(), seed]), *totals, *units]
    reading = _Reading(torch.cat(columns))
    # With a factor torch's kernel writes the gradients back, so leave out a factor of 1.
    is_one = window.known is not None and window.loss_scale == window.seed == 1.0
    is_one = is_one and options.clip_norm is None
    scale = None if is_one else (1.0 / (normalise * clip)).float()  # not read if it is bad
    for optimizer in optimizers:
        with replaced_attributes(optimizer, grad_scale=scale, found_inf=bad.float()):
            optimizer.step()
    if while_waiting is not None:
        while_waiting()

    (norm_is, clip_is, bad_is, window.seed), *lists = reading.wait([len(one) for one in columns])
    window.totals = dict(zip(names, lists[: len(names)], strict=True))
    window.units = dict(zip(names, lists[len(names) :], strict=True))
    return None if bad_is else Closed(norm=norm_is, clip=clip_is, finite=True, stepped=True)


def _normalise(
    window: OpenWindow,
    names: Sequence[str],
    totals: Sequence[Tensor],
    units: Sequence[Tensor],
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the factor that normalises the gradients, and whether the sums allow a step."""
    total = torch.stack([column.sum() for column in totals])
    count = torch.stack([column.sum() for column in units])
    largest = count.max()
    good = total.isfinite().all() & (largest > 0)
    if window.known is None:
        return 1.0 / (largest * seed) / window.loss_scale, good
    known = torch.tensor([window.known[name] for name in names], dtype=torch.float64)
    known = known.to(seed.device, non_blocking=True)
    good = good & torch.isclose(count, known, rtol=1e-6, atol=0.0).all()
    return 1.0 / seed / window.loss_scale, good


def _column(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return numbers and 0-dim tensors as one column on the device."""
    if all(isinstance(value, Tensor) for value in values):
        tensors = cast("Sequence[Tensor]", values)
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
            return torch.stack(list(tensors)).to(device, torch.float64)
        return torch.stack([tensor.to(device, torch.float64) for tensor in tensors])
    if not any(isinstance(value, Tensor) for value in values):
        column = torch.tensor(values, dtype=torch.float64)
        return column.to(device, non_blocking=True)
    return torch.stack([scalar_on(device, value, torch.float64) for value in values])


class _Reading:
    """Copies numbers to the host without waiting for later work of the device."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))

    def wait(self, lengths: list[int]) -> list[list[float]]:
        if self._event is not None:
            self._event.synchronize()
        return [part.tolist() for part in self._host.split(lengths)]
