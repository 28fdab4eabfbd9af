"""The kernel of `norms`: a layer norm's backward and the operations around it in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from wholebatch.compile.kernels.column_sums import processors, sum_columns

if TYPE_CHECKING:
    from wholebatch.compile.layer_norm import Read

__all__ = ["launch"]

_NUMBERS_PER_WARP = 512
_WARPS_PER_PROCESSOR = 8
_FEWEST_ROWS = 4
"""The least number of rows per program: every program's partial sums are written and read again."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def layer_norm_rows(  # type: ignore[no-untyped-def]
    gradients, inputs, addends, means, rstds, weight, residuals, outs, lows, partials,
    rows, columns,
    has_addend: tl.constexpr, has_weight: tl.constexpr, has_residual: tl.constexpr,
    has_low: tl.constexpr, sums_weight: tl.constexpr, sums_bias: tl.constexpr,
    sums_low: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    here = tl.arange(0, block)
    inside = here < columns
    if has_weight:
        w = tl.load(weight + here, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros([block], dtype=tl.float32)
    of_bias = tl.zeros([block], dtype=tl.float32)
    of_low = tl.zeros([block], dtype=tl.float32)
    start = program.to(tl.int64) * columns
    stride = programs.to(tl.int64) * columns
    # Prefetch: load the next row before working on this one.
    g_next = tl.load(gradients + start + here, mask=inside, other=0.0)
    x_next = tl.load(inputs + start + here, mask=inside, other=0.0)
    if has_addend:
        a_next = tl.load(addends + start + here, mask=inside, other=0.0)
    if has_residual:
        r_next = tl.load(residuals + start + here, mask=inside, other=0.0)
    for row in range(program, rows, programs):
        g = g_next.to(tl.float32)
        x = x_next
        if has_addend:
            x += a_next.to(tl.float32)
        mean = tl.load(means + row)
        rstd = tl.load(rstds + row)
        following = start + stride
        more = inside & (row + programs < rows)
        g_next = tl.load(gradients + following + here, mask=more, other=0.0)
        x_next = tl.load(inputs + following + here, mask=more, other=0.0)
        if has_addend:
            a_next = tl.load(addends + following + here, mask=more, other=0.0)
        if has_residual:
            residual = r_next
            r_next = tl.load(residuals + following + here, mask=more, other=0.0)
        normal = tl.where(inside, (x - mean) * rstd, 0.0)
        if sums_weight:
            of_weight += g * normal
        if sums_bias:
            of_bias += g
        if has_weight:
            g *= w
        along = tl.sum(g, 0) / columns
        across = tl.sum(g * normal, 0) / columns
        out = (g - along - normal * across) * rstd
        if has_residual:
            out += residual
        tl.store(outs + start + here, out, mask=inside)
        if has_low:
            low = out.to(lows.dtype.element_ty)
            tl.store(lows + start + here, low, mask=inside)
            if sums_low:
                of_low += low.to(tl.float32)
        start = following
    at = partials + program.to(tl.int64) * columns + here
    if sums_weight:
        tl.store(at, of_weight, mask=inside)
    if sums_bias:
        tl.store(at + stride, of_bias, mask=inside)
    if sums_low:
        tl.store(at + 2 * stride, of_low, mask=inside)


def launch(read: Read, low: Tensor | None, total: Tensor, sums: list[bool]) -> Tensor:
    """Return the gradient of `x` plus `residual`, and write it to `low` too.

    The sums of the rows go to `total`.
    """
    x = read.x
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty_like(x)
    if not rows:
        total.zero_()
        return out
    block = triton.next_power_of_2(columns)
    warps = min(max(block // _NUMBERS_PER_WARP, 1), 16)
    programs = processors(x.device) * max(_WARPS_PER_PROCESSOR // warps, 1)
    programs = min(programs, triton.cdiv(rows, _FEWEST_ROWS))
    partials = torch.empty(3, programs, columns, dtype=torch.float32, device=x.device)
    kernel: Any = layer_norm_rows[(programs,)]
    kernel(
        *read, out, low, partials, rows, columns,
        has_addend=read.addend is not None, has_weight=read.weight is not None,
        has_residual=read.residual is not None, has_low=low is not None,
        sums_weight=sums[0], sums_bias=sums[1], sums_low=sums[2], block=block, num_warps=warps,
    )  # fmt: skip
    if any(sums):
        sum_columns(partials, total, adds=False)
    return out
