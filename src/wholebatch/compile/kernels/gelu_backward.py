"""The kernel of `gelu`: the gradient of a GELU, and the sums of its columns."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from wholebatch.compile.kernels.column_sums import processors, sum_columns

__all__ = ["launch"]

_ROWS, _COLUMNS = 2, 256
"""The tile of one program."""
_PROGRAMS_PER_PROCESSOR = 16


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gelu_backward_columns(  # type: ignore[no-untyped-def]
    gradients, inputs, outs, partials, rows, columns,
    linear: tl.constexpr, cubic: tl.constexpr, is_tanh: tl.constexpr,
    block_of_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(0) * block + tl.arange(0, block)
    inside = here < columns
    lines = tl.arange(0, block_of_rows)
    stride = tl.num_programs(1) * block_of_rows
    total = tl.zeros([block_of_rows, block], dtype=tl.float32)
    for first in range(tl.program_id(1) * block_of_rows, rows, stride):
        line = first + lines
        at = line[:, None].to(tl.int64) * columns + here[None, :]
        there = (line < rows)[:, None] & inside[None, :]
        x = tl.load(inputs + at, mask=there, other=0.0).to(tl.float32)
        g = tl.load(gradients + at, mask=there, other=0.0).to(tl.float32)
        squared = x * x
        if is_tanh:
            # s + x s (1 - s) (2u)′, where s is the logistic function of 2u.
            share = tl.sigmoid(x * (linear + cubic * squared))
            inner = linear + 3.0 * cubic * squared
            slope = share + x * share * (1.0 - share) * inner
        else:
            density = 0.3989422804014327 * tl.exp(-0.5 * squared)
            slope = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476) + x * density
        out = (g * slope).to(outs.dtype.element_ty)
        tl.store(outs + at, out, mask=there)
        total += out.to(tl.float32)
    column = tl.sum(total, 0)
    tl.store(partials + tl.program_id(1) * columns + here, column, mask=inside)


def launch(
    gradient: Tensor, x: Tensor, bias_sum: Tensor, *, is_tanh: bool, linear: float, cubic: float
) -> Tensor:
    """Return the gradient of `x`, and add the sum of its rows to `bias_sum`."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty_like(x)
    if not rows:
        return out
    wide = triton.cdiv(columns, _COLUMNS)
    high = min(
        triton.cdiv(processors(x.device) * _PROGRAMS_PER_PROCESSOR, wide), triton.cdiv(rows, _ROWS)
    )
    partials = torch.empty(high, columns, dtype=torch.float32, device=x.device)
    kernel: Any = gelu_backward_columns[(wide, high)]
    kernel(
        gradient, x, out, partials, rows, columns,
        linear=linear, cubic=cubic, is_tanh=is_tanh,
        block_of_rows=_ROWS, block=_COLUMNS, num_warps=4,
    )  # fmt: skip
    sum_columns(partials[None], bias_sum[None], adds=True)
    return out
