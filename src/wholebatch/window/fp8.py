"""`precision="fp8"`: bf16 autocast whose linear layers compute y and dx in 8 bits (float8_e4m3).

Every row of a left factor and every column of a right factor has a scale of its own, so that a
token's numbers do not depend on the tokens beside it:

    y  = (Q(x) s_x) (Q(W) s_W)ᵀ    x scaled by token, W by output channel
    dx = (Q(g) s_g) (Q(W) t_W)     g scaled by token, W by input channel
    dW = gᵀ x                      16-bit factors, added in fp32

A scale is the power of two that brings the largest number of its row into (224, 448], the largest
that the format has. So scaling rounds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.window.autocast import Autocast
from wholebatch.window.forward_state import replaced_attributes

_FLOAT8 = torch.float8_e4m3fn
_LEAST = 2.0**-100
"""Rows with smaller numbers are scaled as if this were the largest, which avoids subnormals."""
_QUARTER, _EXPONENT = 0x1FFFFF, 0x7F800000
"""Bits of a float32: a quarter of its leading bit, less one unit; and its exponent."""
_448 = 8 << 23  # The exponent of 448 = 1.75 x 2^8.
_ONE = 254 << 23  # The exponents of a power of two and of its reciprocal add up to this.


def quantise(matrix: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8 bits, and its scales: by row, or by these largest absolute values.

    NaN is the scale of a row that is not finite.
    """
    largest = matrix.abs().amax(-1, keepdim=True) if largest is None else largest
    largest = largest.float().clamp(min=_LEAST)
    # A fraction above 1.75 carries into the exponent; what is left of the fraction is cut off.
    bits = ((largest.view(torch.int32) + _QUARTER) & _EXPONENT) - _448
    scales = torch.where(largest.isfinite(), bits.view(torch.float32), torch.nan)
    return (matrix * (_ONE - bits).view(torch.float32)).to(_FLOAT8), scales


class Quantised(NamedTuple):
    """A weight in 8 bits: by output channel, and transposed by input channel."""

    rows: Tensor
    row_scales: Tensor
    columns: Tensor
    column_scales: Tensor

    @staticmethod
    def empty(weight: Tensor) -> Quantised:
        """Return the parts of a weight, not computed yet."""
        parts = []
        for rows, columns in (weight.shape, weight.shape[::-1]):
            parts.append(weight.new_empty((rows, columns), dtype=_FLOAT8))
            parts.append(weight.new_empty((rows, 1), dtype=torch.float32))
        return Quantised(*parts)

    def fill(self, weight: Tensor) -> None:
        """Quantise the weight into these parts."""
        for dim, numbers, scales in ((1, self.rows, self.row_scales), (0, *self[2:])):
            low, high = torch.aminmax(weight, dim=dim, keepdim=True)
            made = quantise(weight, torch.maximum(high, -low))
            numbers.copy_(made[0] if dim else made[0].t())
            scales.copy_(made[1] if dim else made[1].t())


@torch.library.custom_op("wholebatch::quantise_weight", mutates_args=())
def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the parts of `Quantised`; graphs take them as inputs, made once per window."""
    made = Quantised.empty(weight)
    made.fill(weight)
    return tuple(made)  # type: ignore[return-value]


@quantise_weight.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(Quantised.empty(weight))  # type: ignore[return-value]


def product(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `left @ right.t()` of quantised rows; devices without the kernel emulate it."""
    if type(left) is Tensor and not left.numel():  # For example an expert without tokens.
        return left.new_empty((0, right.shape[0]), dtype=dtype)
    if left.is_cuda:
        scales = {"scale_a": left_scales, "scale_b": right_scales.t()}
        return torch._scaled_mm(left, right.t(), **scales, out_dtype=dtype, use_fast_accum=True)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    with torch.autocast(left.device.type, enabled=False):
        sums = left.to(wide) @ right.to(wide).t()
    return (sums * left_scales * right_scales.t()).to(dtype)


def rows_of(tensor: Tensor) -> Tensor:
    """Return the tensor as a matrix: one row per token."""
    return tensor.reshape(-1, tensor.shape[-1])


class _Linear(torch.autograd.Function):
    """`linear(x, weight, bias)`, given the quantised weight `w` and the quantised `rows` of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, w: Quantised, rows: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.w, ctx.bias_dtype = w, None if bias is None else bias.dtype
        y = product(rows[0], rows[1], w.rows, w.row_scales, x.dtype)
        return (y if bias is None else y + bias.to(x.dtype)).reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        rows, dx, dw, db = rows_of(dy), None, None, None
        if wants_x:
            dx = product(*quantise(rows), ctx.w.columns, ctx.w.column_scales, dy.dtype)
            dx = dx.reshape(*dy.shape[:-1], dx.shape[-1])
        if wants_weight:
            dw = torch.mm(rows.t(), rows_of(x)).to(weight.dtype)
        if wants_bias:
            db = rows.sum(0, dtype=ctx.bias_dtype)
        return dx, dw, db, None, None


class Fp8(Autocast):
    """bf16 autocast with 8-bit linear layers.

    The weights change only when a window closes: each is quantised once per window. A layer that
    computes in 8 bits has a forward of its own within a window, which computes as written where
    autocast is off.
    """

    anywhere: ClassVar[bool] = False
    """Set by tests: emulate the products on devices that do not have them."""
    least: ClassVar[int] = 128
    """Layers with fewer features stay in bf16: casting their input would take longer."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        device = next(models[0].parameters()).device
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        has_it = is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)
        if not (has_it or self.anywhere):
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            raise UnsupportedError(
                f"precision='fp8' on {name}: it needs an NVIDIA GPU of compute capability 9.0 or "
                "higher (Hopper, Blackwell); use precision='bf16'"
            )
        super().__init__(device.type, torch.bfloat16)
        self.name = "fp8"
        layers = [layer for model in models for layer in eight_bit_layers(model, self.least)]
        if not layers:
            raise OptionError(
                "precision='fp8': no layer can use it. It is for trained nn.Linear layers with a "
                f"weight of their own and at least {self.least} features on both sides, multiples "
                "of 16; the output layer stays in bf16. Use precision='bf16'"
            )
        self._layers = [(layer, MethodType(self._run, layer)) for layer in layers]
        self._weights: dict[int, tuple[int, Quantised]] = {}  # By weight: its version, in 8 bits.
        self._input: tuple[Any, ...] = ()  # The last input that was quantised.

    def _run(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(self._device_type):
            return nn.Linear.forward(layer, x)
        cast = x if x.dtype is torch.float64 else x.to(self._dtype)  # Autocast leaves float64.
        # Layers often share an input: queries, keys and values. It is quantised once.
        if not self._input or self._input[0] is not x or self._input[1] != x._version:
            self._input = x, x._version, quantise(rows_of(cast.detach()))
        return _Linear.apply(  # type: ignore[no-any-return, no-untyped-call]
            cast, layer.weight, layer.bias, self._quantised(layer.weight), self._input[2]
        )

    def _quantised(self, weight: Tensor) -> Quantised:
        """Return the weight in 8 bits, made once per window."""
        version, made = self._weights.get(id(weight), (-1, None))
        if made is None or version != weight._version:
            made = Quantised(*quantise_weight(weight.detach()))
            if self._holding and type(weight) is nn.Parameter:  # A trace replaces the weights.
                self._weights[id(weight)] = weight._version, made
        return made

    @contextmanager
    def forward(self) -> Iterator[None]:
        try:
            with self._replaced(), super().forward():
                yield
        finally:
            self._input = ()

    def for_audit(self) -> AbstractContextManager[object]:
        # In bf16: in a deep model at its start, 8-bit gradients of few samples are mostly noise.
        return super().forward()

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """Replace the forwards of the layers; a window has replaced them already."""
        with ExitStack() as stack:
            for layer, run in self._layers:
                if "forward" not in vars(layer):
                    stack.enter_context(replaced_attributes(layer, forward=run))
            yield

    @contextmanager
    def window(self) -> Iterator[None]:
        # Checkpointing runs a forward within the backward: replace them for both.
        with self._replaced(), super().window():
            yield

    def let_go(self) -> None:
        self._weights.clear()
        super().let_go()

    def end(self) -> None:
        self._weights.clear()
        super().end()


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

    def fits(layer: nn.Linear) -> bool:
        weight = layer._parameters.get("weight")
        is_plain = type(layer).forward is nn.Linear.forward and type(weight) is nn.Parameter
        if not is_plain or weight is None or any(layer is one for one in outputs):
            return False
        its_own = weight.requires_grad and weight.is_contiguous() and places[id(weight)] == 1
        return its_own and all(size >= least and size % 16 == 0 for size in weight.shape)

    return [layer for layer in layers if fits(layer)]
