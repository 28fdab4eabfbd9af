"""Triton kernels that quantise to float8_e4m3, as `linear_layers.py` does by torch operations.

Triton ships with torch's CUDA builds, so this module is imported only for a CUDA device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_TILE = 64
_NUMBERS_PER_WARP = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _exponent(largest):  # type: ignore[no-untyped-def]
    """Return the bits of the scale, from those of the largest absolute value."""
    least = tl.full([], 0x0D800000, tl.int32)  # 2^-100
    return ((tl.maximum(largest, least) + 0x1FFFFF) & 0x7F800000) - (8 << 23)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scale(largest):  # type: ignore[no-untyped-def]
    scale = _exponent(largest).to(tl.float32, bitcast=True)
    return tl.where(largest < 0x7F800000, scale, float("nan"))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _inverse(largest):  # type: ignore[no-untyped-def]
    return ((254 << 23) - _exponent(largest)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _size(x):  # type: ignore[no-untyped-def]
    """Return the bits of the absolute value; as integers they have the order of the numbers."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rows(rows, made, scales, columns, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    here = tl.arange(0, block)
    x = tl.load(rows + row * stride + here, mask=here < columns, other=0.0)
    largest = tl.max(_size(x), 0)
    tl.store(scales + row, _scale(largest))
    x = x.to(tl.float32) * _inverse(largest)
    tl.store(made + row * columns + here, x.to(tl.float8e4nv), mask=here < columns)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _largest(weight, by_row, by_column, rows, columns, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0) * tile + tl.arange(0, tile)).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    size = _size(tl.load(weight + row[:, None] * columns + column[None, :], mask=inside, other=0.0))
    tl.atomic_max(by_row + row, tl.max(size, 1), mask=row < rows, sem="relaxed")
    tl.atomic_max(by_column + column, tl.max(size, 0), mask=column < columns, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _both_layouts(  # type: ignore[no-untyped-def]
    weight, by_row, by_column, rowwise, row_scales, columnwise, column_scales, rows, columns,
    tile: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * tile + tl.arange(0, tile)).to(tl.int64)
    column = (tl.program_id(1) * tile + tl.arange(0, tile)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(weight + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    of_rows = tl.load(by_row + row, mask=row < rows, other=0)
    of_columns = tl.load(by_column + column, mask=column < columns, other=0)
    if tl.program_id(1) == 0:
        tl.store(row_scales + row, _scale(of_rows), mask=row < rows)
    if tl.program_id(0) == 0:
        tl.store(column_scales + column, _scale(of_columns), mask=column < columns)
    made = (x * _inverse(of_rows)[:, None]).to(tl.float8e4nv)
    tl.store(rowwise + row[:, None] * columns + column[None, :], made, mask=inside)
    made = tl.trans((x * _inverse(of_columns)[None, :]).to(tl.float8e4nv))
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(columnwise + column[:, None] * rows + row[None, :], made, mask=inside)


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row in 8 bits, and its scale."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    number, columns = rows.shape
    made = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((number, 1), dtype=torch.float32, device=rows.device)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // _NUMBERS_PER_WARP, 1), 16)
    if number:
        kernel: Any = _rows[(number,)]
        kernel(rows, made, scales, columns, rows.stride(0), block=block, num_warps=warps)
    return made, scales


def quantise_weight(weight: Tensor, parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Quantise a contiguous weight into `parts`, those of `Quantised`: two reads, one write."""
    rows, columns = weight.shape
    largest = torch.zeros(rows + columns, dtype=torch.int32, device=weight.device)
    sizes = (largest[:rows], largest[rows:])
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    measure: Any = _largest[grid]
    measure(weight, *sizes, rows, columns, tile=_TILE)
    write: Any = _both_layouts[grid]
    write(weight, *sizes, *parts, rows, columns, tile=_TILE)
