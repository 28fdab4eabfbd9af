"""Grouped matrix products of dtypes that torch runs and cannot trace: the experts of an MoE.

torch's own shape function for `_grouped_mm` admits bfloat16 alone; its kernels also take float32
and float16 (their sizes are read by the host there, so CUDA cannot record them). The trace records
an operation of the same kernel with a shape function for all dtypes instead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from wholebatch.compile.fusion import operation


def grouped(func: Any, args: Any, kwargs: Any) -> Any:
    """Record a grouped product that is not in bfloat16 as an operation with a known shape."""
    if getattr(func, "__name__", "") == "_grouped_mm.default":
        left, right, offsets, bias, dtype = _arguments(*args, **kwargs)
        if left.dtype != torch.bfloat16 and bias is None and dtype in (None, left.dtype):
            return grouped_product()(left, right, offsets)
    return NotImplemented


def _arguments(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, torch.dtype | None]:
    return left, right, offs, bias, out_dtype


@cache
def grouped_product() -> Any:
    """Return the op `(left, right, offsets)`: torch's grouped product, contiguous."""

    def run(left: Tensor, right: Tensor, offsets: Tensor | None) -> Tensor:
        product: Tensor = torch._grouped_mm(left, right, offs=offsets)
        return product.contiguous()

    def fake(left: Tensor, right: Tensor, offsets: Tensor | None) -> Tensor:
        rows, columns = left.shape[-2], right.shape[-1]
        if left.dim() != right.dim():  # The groups are rows, or columns, of one result.
            return left.new_empty(rows, columns)
        groups = left.shape[0] if offsets is None else offsets.shape[0]
        return left.new_empty(groups, rows, columns)

    return operation("grouped_product", run, fake)
