"""The kernel of `joining`: three matrices side by side, with the sums of their columns.

Imported only where a CUDA device asks for it: Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from wholebatch.execute.columns_kernel import add_columns, processors

__all__ = ["launch"]

_ROWS, _COLUMNS = 2, 256
"""Of what a program works on at a time."""
_PROGRAMS_PER_PROCESSOR = 16


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def join_columns(  # type: ignore[no-untyped-def]
    first_part, second_part, third_part, outs, partials, rows, columns,
    block_of_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(2)
    if which == 0:
        source = first_part
    elif which == 1:
        source = second_part
    else:
        source = third_part
    here = tl.program_id(0) * block + tl.arange(0, block)
    inside = here < columns
    lines = tl.arange(0, block_of_rows)
    stride = tl.num_programs(1) * block_of_rows
    total = tl.zeros([block_of_rows, block], dtype=tl.float32)
    for first in range(tl.program_id(1) * block_of_rows, rows, stride):
        line = first + lines
        row = line[:, None].to(tl.int64) * columns
        there = (line < rows)[:, None] & inside[None, :]
        x = tl.load(source + row + here[None, :], mask=there, other=0.0)
        tl.store(outs + 3 * row + which * columns + here[None, :], x, mask=there)
        total += x.to(tl.float32)
    target = partials + (tl.program_id(1) * 3 + which) * columns + here
    tl.store(target, tl.sum(total, 0), mask=inside)


def launch(parts: list[Tensor], bias_sum: Tensor) -> Tensor:
    """The three parts side by side; the sum of the rows is added to `bias_sum`."""
    first = parts[0]
    columns = first.shape[-1]
    rows = first.numel() // columns
    out = first.new_empty(*first.shape[:-1], 3 * columns)
    if not rows:
        return out
    wide = triton.cdiv(columns, _COLUMNS)
    high = triton.cdiv(processors(first.device) * _PROGRAMS_PER_PROCESSOR, 3 * wide)
    high = min(high, triton.cdiv(rows, _ROWS))
    partials = torch.empty(1, high, 3 * columns, dtype=torch.float32, device=first.device)
    kernel: Any = join_columns[(wide, high, 3)]
    kernel(*parts, out, partials, rows, columns, block_of_rows=_ROWS, block=_COLUMNS, num_warps=4)
    add_columns(partials, bias_sum, [0])
    return out
