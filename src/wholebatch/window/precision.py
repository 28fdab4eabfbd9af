"""The number formats of a micro-batch's computation and of its gradient sums.

`Precision` decides how the forward runs (plain, or under autocast with the weights cast, or
quantised, once per window), `LossScale` keeps fp16 gradients in range, and `SixteenBit` adds the
gradients of 16-bit parameters in fp32. bf16 keeps 8 bits: after a few dozen additions, a
micro-batch's gradient falls below half a unit in the last place of the sum and is lost (error
1.1e-1 after 256 additions; 1e-8 in fp32). `Parameter.grad_dtype` makes autograd itself add into an
fp32 `.grad`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.window.forward_state import replaced_attributes
from wholebatch.window.linear_layers import (
    Linear,
    Quantised,
    quantise,
    quantise_weight,
    rows_of,
)

PrecisionName: TypeAlias = Literal["full", "fp32", "bf16", "fp16", "fp8"]


class Precision(ABC):
    """One number format for the forward passes of a window."""

    name: str

    @abstractmethod
    def forward(self) -> AbstractContextManager[object]:
        """Return the context for a micro-batch's forward (and only for that)."""

    def look(self) -> AbstractContextManager[object]:
        """Return the context for the look at a few samples, before the first window."""
        return self.forward()

    def copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in this dtype, outside the autograd graph."""
        return weight.detach().to(dtype)

    def linear(self, layer: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the output of a linear layer that computes in this dtype."""
        weight, bias = layer.weight, layer.bias
        w, rows = self._factors(layer, x, dtype)
        b = None if bias is None else self.copy_of(bias, dtype)
        y: Tensor = Linear.apply(x.to(dtype), weight, bias, w, b, rows)  # type: ignore[no-untyped-call]
        return y

    def _factors(
        self, layer: nn.Linear, x: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor | Quantised, tuple[Tensor, Tensor] | None]:
        """Return the weight of a layer's products, and its input if that is quantised too."""
        return self.copy_of(layer.weight, dtype), None

    def let_go(self) -> None:
        """Drop cached casts; they are made again when needed."""
        return

    def window(self) -> AbstractContextManager[object]:
        """Return the context of a window's micro-batches: casts of weights are kept within it."""
        return nullcontext()

    def begin(self) -> None:
        """Keep casts of weights from here until `end`, as within `window()`."""
        return

    def end(self) -> None:
        """Drop the casts: the weights are about to change."""
        return


class Full(Precision):
    """No autocast: the parameters' own dtype."""

    name = "full"
    forward = nullcontext
    window = nullcontext


class Autocast(Precision):
    """torch.autocast, with every weight cast once per window instead of once per micro-batch.

    Autocast caches its casts of leaf parameters until its outermost context is left. Counting the
    window as one more level of nesting extends that to the window's end. The weights do not change
    in between, so the casts hold the same numbers, and their backward is the same cast.

    With `keeps=False` casts are not kept. An engine that frees weights between blocks or
    micro-batches would leave their casts behind. And FSDP2 reduces a block's gradients when the
    block's backward is over, while the backward of a cast made by an earlier micro-batch comes
    later.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, *, keeps: bool = True) -> None:
        self.name = "bf16" if dtype is torch.bfloat16 else "fp16"
        self._device_type = device_type
        self._dtype = dtype
        self._keeps = keeps
        self._holding = False
        self._copies: dict[tuple[int, object], tuple[int, Any]] = {}

    def forward(self) -> AbstractContextManager[object]:
        # Without a cache, a checkpointed block's casts are freed with the block's whole weights.
        # None leaves it as it is: a trace switches it off.
        cache = None if self._keeps else False
        return torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=cache)

    def copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if weight.dtype is dtype:
            return super().copy_of(weight, dtype)
        copy: Tensor = self._kept(weight, dtype, super().copy_of)
        return copy

    def _kept(self, weight: Tensor, kind: Any, make: Callable[[Tensor, Any], Any]) -> Any:
        """Return the weight in another format, made once per window."""
        if not self._holding or type(weight) is not nn.Parameter:  # A trace replaces the weights.
            return make(weight, kind)
        version, copy = self._copies.get((id(weight), kind), (-1, None))
        if version != weight._version:  # Not made yet, or the weight has changed since.
            copy = make(weight, kind)
            self._copies[id(weight), kind] = weight._version, copy
        return copy

    def let_go(self) -> None:
        self._copies.clear()
        torch.clear_autocast_cache()

    @contextmanager
    def window(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        if self._keeps and not self._holding:
            torch.autocast_increment_nesting()
            self._holding = True

    def end(self) -> None:
        self._copies.clear()
        if self._holding:
            self._holding = False
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


class OwnAutocast(Autocast):
    """The autocast that the model's forward enters by itself, as Accelerate makes it."""

    forward = nullcontext


class Fp8(Autocast):
    """bf16 autocast whose linear layers compute y and dx in 8 bits (see `window/linear_layers.py`).

    The weights change only when a window closes: each is quantised once per window. A layer that
    computes in 8 bits has a forward of its own within a window. It computes as written where
    autocast is off, and under torch.func.
    """

    anywhere: ClassVar[bool] = False
    """Set by tests: emulate the products on devices that do not have them."""
    least: ClassVar[int] = 128
    """Layers with fewer features stay in bf16: casting their input would take longer."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        device = next(models[0].parameters()).device
        if not self.anywhere:
            _refuse_without_fp8(device)
        super().__init__(device.type, torch.bfloat16)
        self.name = "fp8"
        layers = [layer for model in models for layer in eight_bit_layers(model, self.least)]
        if not layers:
            raise OptionError(
                "precision='fp8': no layer can use it. It is for nn.Linear layers that are trained "
                f"and have their weight alone, with at least {self.least} features on both sides, "
                "multiples of 16; the output layer stays in bf16. Use precision='bf16'"
            )
        self.layers = {id(layer): (layer, MethodType(self._run, layer)) for layer in layers}
        self._input: tuple[Any, ...] = ()  # The last input that was quantised.

    def _run(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if not self._is_on():
            plain: Tensor = type(layer).forward(layer, x)
            return plain
        # Autocast leaves float64 alone.
        dtype = x.dtype if x.dtype is torch.float64 else self._dtype
        return self.linear(layer, x, dtype)

    def _is_on(self) -> bool:
        return (
            torch.is_autocast_enabled(self._device_type)
            and not torch._C._are_functorch_transforms_active()
        )

    def _factors(
        self, layer: nn.Linear, x: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor | Quantised, tuple[Tensor, Tensor] | None]:
        if id(layer) not in self.layers or not self._is_on():
            return super()._factors(layer, x, dtype)
        # Layers often share an input: queries, keys and values. It is quantised once.
        if not self._input or self._input[0] is not x or self._input[1:3] != (x._version, dtype):
            self._input = x, x._version, dtype, quantise(rows_of(x.detach().to(dtype)))
        quantised = lambda weight, _: Quantised(*quantise_weight()(weight.detach()))  # noqa: E731
        return self._kept(layer.weight, Quantised, quantised), self._input[3]

    @contextmanager
    def forward(self) -> Iterator[None]:
        try:
            with self._replaced(), super().forward():
                yield
        finally:
            self._input = ()

    def look(self) -> AbstractContextManager[object]:
        # In bf16: in a deep model at its start, 8-bit gradients of few samples are mostly noise.
        return super().forward()

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """Replace the forwards of the layers; a window has replaced them already."""
        with ExitStack() as stack:
            for layer, run in self.layers.values():
                if "forward" not in vars(layer):
                    stack.enter_context(replaced_attributes(layer, forward=run))
            yield

    @contextmanager
    def window(self) -> Iterator[None]:
        # Checkpointing runs a forward within the backward: replace them for both.
        with self._replaced(), super().window():
            yield


def eight_bit_layers(model: nn.Module, least: int) -> list[nn.Linear]:
    """Return the linear layers that compute in 8 bits.

    Not the output layer (the one that a model of Transformers names, else the last), nor one whose
    weight other modules have too, or that is not trained.
    """
    layers = [one for one in model.modules() if isinstance(one, nn.Linear)]
    name = "get_output_embeddings"
    named = [getattr(one, name)() for one in model.modules() if hasattr(one, name)]
    outputs = [one for one in named if one is not None] or layers[-1:]
    places = Counter(id(one) for part in model.modules() for one in part._parameters.values())
    return [
        layer
        for layer in layers
        if not any(layer is one for one in outputs)
        and type(layer).forward is nn.Linear.forward
        and type(weight := layer._parameters.get("weight")) is nn.Parameter
        and weight.requires_grad
        and weight.is_contiguous()
        and places[id(weight)] == 1
        and all(size >= least and size % 16 == 0 for size in weight.shape)
    ]


def _refuse_without_fp8(device: torch.device) -> None:
    """Raise an UnsupportedError if the device does not multiply 8-bit rows."""
    if device.type != "cuda":
        name = {"cpu": "a CPU"}.get(device.type, device.type)
    elif torch.version.hip is not None:
        name = "ROCm"
    elif (found := torch.cuda.get_device_capability(device)) < (9, 0):
        name = f"{torch.cuda.get_device_name(device)} (compute capability {found[0]}.{found[1]})"
    else:
        return
    raise UnsupportedError(
        f"precision='fp8' on {name}: it needs an NVIDIA GPU of compute capability 9.0 or higher "
        "(Hopper, Blackwell); use precision='bf16'"
    )


def choose(
    precision: str, device_type: str, *, keeps: bool = True, models: Sequence[nn.Module] = ()
) -> Precision:
    """Return the precision with this name, or raise an OptionError that lists the names.

    `keeps`: weights may be cast once per window, instead of once per micro-batch. `models` are
    those to train in fp8; without them (to predict memory) it counts as bf16, which needs as much.
    """
    if precision in ("full", "fp32"):
        return Full()
    if precision == "fp8" and models:
        if not keeps:
            raise UnsupportedError(
                "precision='fp8' with fully_shard or DeepSpeed: weights are quantised once per "
                "window, and these engines free them after each micro-batch; use precision='bf16', "
                "or DDP"
            )
        return Fp8(models)
    if precision in ("bf16", "fp8"):
        return Autocast(device_type, torch.bfloat16, keeps=keeps)
    if precision == "fp16":
        return Autocast(device_type, torch.float16, keeps=keeps)
    if precision == "model's bf16":
        return OwnAutocast(device_type, torch.bfloat16, keeps=keeps)
    raise OptionError(
        f"precision={precision!r}: must be 'full' (the parameters' own dtype; 'fp32' is the same), "
        "'bf16' or 'fp16' (autocast), or 'fp8' (bf16 with linear layers in 8 bits)"
    )


class LossScale:
    """A GradScaler whose unscaling is part of the window's single factor.

    The scaler's own `unscale_` and `step` would make an extra pass over the gradients. To decide
    its next scale, it only needs to know if any gradient was not finite. It learns that from the
    gradient of one probe parameter. So no private attribute is written, and the user's own scaler
    can be used with its state.
    """

    is_undone_at_close: bool = True
    """False if somebody else divides the gradients by the scale, after the close."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        self._probe = torch.nn.Parameter(torch.zeros((), device=device))
        self._probe_optimizer = torch.optim.SGD([self._probe], lr=0.0)

    @property
    def enabled(self) -> bool:
        return self.scaler.is_enabled()

    def value(self) -> float:
        """Return the scale; a scaler sets up its own state when it first scales something."""
        return float(self.scaler.scale(torch.ones((), device=self._probe.device)))

    def is_unscaled(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """True if somebody has called the scaler's `unscale_` for one of these optimizers."""
        states = getattr(self.scaler, "_per_optimizer_states", {})  # else no version tells it
        return any(states[id(one)]["stage"].value for one in optimizers if id(one) in states)

    def update(self, *, finite: bool) -> None:
        """Tell the scaler if the window was finite; it grows or backs off by its own rules."""
        if not self.enabled:
            return
        self.scaler.scale(torch.zeros((), device=self._probe.device))  # Initialise its lazy state.
        self._probe.grad = torch.full_like(self._probe, 0.0 if finite else float("inf"))
        self.scaler.unscale_(self._probe_optimizer)
        self.scaler.update()
        self._probe.grad = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class SixteenBit:
    """fp32 accumulation for the 16-bit parameters of the optimizers.

    At the close, an optimizer that accepts fp32 gradients (SGD, Adagrad, RMSprop, ...) gets them as
    they are. Others (the Adam family) get them rounded once to the parameter's dtype, as the
    gradient of the undivided batch would be.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._rounded: list[torch.nn.Parameter] = []
        self.parameters: list[torch.nn.Parameter] = []
        """The 16-bit parameters of the optimizers."""
        for optimizer in optimizers:
            mine = [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.dtype in SIXTEEN_BIT
            ]
            if not mine:
                continue
            if not hasattr(mine[0], "grad_dtype"):
                raise UnsupportedError(
                    f"16-bit parameters with torch {torch.__version__}: adding their gradients in "
                    "fp32 needs torch 2.11 or newer; keep float32 parameters, and use "
                    'precision="bf16"'
                )
            self.parameters += mine
            if not _takes_fp32_gradients(optimizer, mine[0]):
                self._rounded += mine

    def rounds(self, parameter: torch.nn.Parameter) -> bool:
        """True if the optimizer gets this parameter's gradient rounded to the parameter's dtype."""
        return any(parameter is one for one in self._rounded)

    def begin(self) -> None:
        """Make autograd add in fp32. Called when a window opens, before there is a gradient."""
        for parameter in self.parameters:
            if parameter.grad_dtype is not torch.float32:
                parameter.grad_dtype = torch.float32

    def round_once(self) -> None:
        """Round the gradients for optimizers that need the parameter's dtype, before the step."""
        for parameter in self._rounded:
            round_gradient(parameter)

    def end(self) -> None:
        """Restore the parameters' `grad_dtype`, unless an fp32 gradient was left to the user."""
        for parameter in self.parameters:
            if parameter.grad is None or parameter.grad.dtype is parameter.dtype:
                parameter.grad_dtype = parameter.dtype


def round_gradient(parameter: torch.nn.Parameter) -> None:
    """Round the gradient of a parameter to the parameter's dtype."""
    gradient = parameter.grad
    if gradient is not None:
        parameter.grad = None
        parameter.grad_dtype = parameter.dtype
        parameter.grad = gradient.to(parameter.dtype)


def _takes_fp32_gradients(optimizer: torch.optim.Optimizer, like: Tensor) -> bool:
    """True if this kind of optimizer can step a 16-bit parameter with an fp32 gradient."""
    try:
        # Use real tensors even in a prediction: with fake ones no kernel refuses its input, and no
        # number can be read.
        with warnings.catch_warnings(), _disable_current_modes():
            warnings.simplefilter("ignore")
            probe = torch.nn.Parameter(torch.zeros(2, dtype=like.dtype, device=like.device))
            probe.grad_dtype = torch.float32
            probe.grad = torch.zeros(2, dtype=torch.float32, device=like.device)
            type(optimizer)([probe], **optimizer.defaults).step()
    except Exception:  # An unknown optimizer may raise anything; rounding is safe.
        return False
    return True
