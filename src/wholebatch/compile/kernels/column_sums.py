"""The second half of column sums: add up the partial sums of many programs.

The order is fixed, so that the same micro-batch gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

__all__ = ["processors", "sum_columns"]

_COLUMNS, _LINES = 32, 32
"""The tile of one program."""


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of the device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def column_sums(  # type: ignore[no-untyped-def]
    partials, totals, programs, columns,
    adds: tl.constexpr, block_of_lines: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    here = tl.program_id(0) * block + tl.arange(0, block)
    inside = here < columns
    lines = tl.arange(0, block_of_lines)
    start = partials + which * programs * columns
    total = tl.zeros([block_of_lines, block], dtype=tl.float32)
    for first in range(0, programs, block_of_lines):
        line = first + lines
        there = (line < programs)[:, None] & inside[None, :]
        total += tl.load(start + line[:, None] * columns + here[None, :], mask=there, other=0.0)
    column = tl.sum(total, 0)
    target = totals + which * columns + here
    if adds:
        column += tl.load(target, mask=inside)
    tl.store(target, column, mask=inside)


def sum_columns(partials: Tensor, totals: Tensor, *, adds: bool) -> None:
    """Set `totals[i]` to `partials[i].sum(0)`, or add it if `adds`."""
    number, programs, columns = partials.shape
    kernel: Any = column_sums[(triton.cdiv(columns, _COLUMNS), number)]
    kernel(
        partials, totals, programs, columns,
        adds=adds, block_of_lines=_LINES, block=_COLUMNS, num_warps=4,
    )  # fmt: skip
