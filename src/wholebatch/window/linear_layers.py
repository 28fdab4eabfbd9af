"""Linear layers whose three products this library computes, in 16 or in 8 bits.

In 8 bits (float8_e4m3) every row of a left factor and every column of a right factor has a scale of
its own, so that a token's numbers do not depend on the tokens beside it:

    y  = (Q(x) s_x) (Q(W) s_W)ᵀ    x scaled by token, W by output channel
    dx = (Q(g) s_g) (Q(W) t_W)     g scaled by token, W by input channel
    dW = gᵀ x                      16-bit factors, added in fp32

A scale is the power of two that brings the largest number of its row into (224, 448], the largest
that the format has. So scaling rounds nothing, and both layouts of `W` hold the same numbers but
for those that are too small for the format beside the largest of their row.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

FLOAT8 = torch.float8_e4m3fn
_LEAST = 2.0**-100
"""Rows with smaller numbers are scaled as if this were the largest, which avoids subnormals."""
_QUARTER, _EXPONENT = 0x1FFFFF, 0x7F800000
"""Bits of a float32: a quarter of its leading bit, less one unit; and its exponent."""
_448 = 8 << 23  # The exponent of 448 = 1.75 x 2^8.
_ONE = 254 << 23  # The exponents of a power of two and of its reciprocal add up to this.


class Quantised(NamedTuple):
    """A weight in 8 bits: by output channel, and transposed by input channel."""

    rows: Tensor
    row_scales: Tensor
    columns: Tensor
    column_scales: Tensor

    @staticmethod
    def empty(weight: Tensor) -> Quantised:
        """Return the parts of a weight, not computed yet."""
        above, below = weight.shape
        return Quantised(
            weight.new_empty((above, below), dtype=FLOAT8),
            weight.new_empty((above, 1), dtype=torch.float32),
            weight.new_empty((below, above), dtype=FLOAT8),
            weight.new_empty((below, 1), dtype=torch.float32),
        )

    def fill(self, weight: Tensor) -> None:
        """Quantise the weight into these parts."""
        kernels = _kernels(weight.device)
        if kernels is not None and weight.dtype is not torch.float64:
            kernels.quantise_weight(weight, self)
            return
        for part, made in zip(self, _both_layouts(weight), strict=True):
            part.copy_(made)

    def linear(self, x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the outputs of quantised inputs."""
        return product(x, scales, self.rows, self.row_scales, dtype)

    def input_gradient(self, dy: Tensor) -> Tensor:
        """Return the gradient of the input, from that of the output."""
        dx = product(*quantise(rows_of(dy)), self.columns, self.column_scales, dy.dtype)
        return dx.reshape(*dy.shape[:-1], dx.shape[-1])


@cache
def quantise_weight() -> Any:
    """Return the op `weight -> Quantised`: graphs take its results as inputs, once per window."""

    @torch.library.custom_op("wholebatch::quantise_weight", mutates_args=())
    def operation(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        made = Quantised.empty(weight)
        made.fill(weight)
        return tuple(made)  # type: ignore[return-value]

    @operation.register_fake
    def _(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return tuple(Quantised.empty(weight))  # type: ignore[return-value]

    del _
    return torch.ops.wholebatch.quantise_weight.default


def rows_of(tensor: Tensor) -> Tensor:
    """Return the tensor as a matrix: one row per token."""
    return tensor.reshape(-1, tensor.shape[-1])


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row in 8 bits, and its scale; NaN is the scale of a row that is not finite."""
    # A trace records operations of torch, which a compiler fuses with those that made the rows.
    if type(rows) is Tensor and rows.dtype is not torch.float64:
        kernels = _kernels(rows.device)
        if kernels is not None:
            made: tuple[Tensor, Tensor] = kernels.quantise_rows(rows)
            return made
    return _quantise(rows)


def _quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    largest = rows.abs().amax(-1, keepdim=True).float().clamp(min=_LEAST)
    # A fraction above 1.75 carries into the exponent; what is left of the fraction is cut off.
    bits = ((largest.view(torch.int32) + _QUARTER) & _EXPONENT) - _448
    scales = torch.where(largest.isfinite(), bits.view(torch.float32), torch.nan)
    wide = rows if rows.dtype is torch.float64 else rows.float()
    return (wide * (_ONE - bits).view(torch.float32)).to(FLOAT8), scales


def _both_layouts(weight: Tensor) -> Quantised:
    return Quantised(*_quantise(weight), *_quantise(weight.t().contiguous()))


@cache
def _kernels(device: torch.device) -> Any:
    """Return the module of the kernels; None if the device has none, or they compute otherwise."""
    if device.type != "cuda":
        return None
    try:
        kernels: Any = import_module("wholebatch.window.fp8_kernels")
        numbers = torch.arange(80 * 144, device=device).reshape(80, 144)
        weight = numbers.remainder(1009).sub(480).float().mul(numbers.remainder(37).sub(18).exp2())
        weight = weight.bfloat16()
        wanted, found = _both_layouts(weight), Quantised.empty(weight)
        kernels.quantise_weight(weight, found)
        rows = kernels.quantise_rows(weight)
        pairs = [*zip(wanted, found, strict=True), *zip(wanted, rows, strict=False)]
    except Exception:  # A compiler may raise anything; torch's operations do the same.
        return None
    same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    return kernels if same else None


def product(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `left @ right.t()` of quantised rows; devices without the kernel emulate it."""
    if type(left) is Tensor and not left.numel():  # For example an expert without tokens.
        return left.new_empty((0, right.shape[0]), dtype=dtype)
    if left.is_cuda:
        return torch._scaled_mm(
            left,
            right.t(),
            scale_a=left_scales,
            scale_b=right_scales.t(),
            out_dtype=dtype,
            use_fast_accum=True,
        )
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    with torch.autocast(left.device.type, enabled=False):
        sums = torch.mm(left.to(wide), right.to(wide).t())
    return (sums * left_scales * right_scales.t()).to(dtype)


class Linear(torch.autograd.Function):
    """`linear(x, w, b)`, where `w` and `b` are the weight and bias in the dtype of `x`.

    If `w` is quantised, so is `rows`, the input by token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        w: Tensor | Quantised,
        b: Tensor | None,
        rows: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.w = w
        ctx.bias_dtype = None if bias is None else bias.dtype
        if isinstance(w, Tensor):
            return functional.linear(x, w, b)
        assert rows is not None
        y = w.linear(*rows, x.dtype)
        return (y if b is None else y + b).reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # A backward that will be differentiated again must depend on the weight itself.
        w = weight.to(x.dtype) if torch.is_grad_enabled() else ctx.w
        dx = dw = db = None
        if wants_x:
            dx = torch.matmul(dy, w) if isinstance(w, Tensor) else w.input_gradient(dy)
        if wants_weight:
            dw = torch.mm(rows_of(dy).t(), rows_of(x)).to(weight.dtype)
        if wants_bias:
            db = rows_of(dy).sum(0, dtype=ctx.bias_dtype)
        return dx, dw, db, None, None, None
