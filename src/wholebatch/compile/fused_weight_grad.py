"""Weight gradients accumulated by the matrix product itself: 16-bit inputs, an fp32 buffer.

`dW = dYᵀ X` in bf16 is written, read again, cast and added into the fp32 buffer: about 10 bytes of
traffic per parameter and micro-batch. cuBLAS can save it, because its products accept an fp32
addend. The CPU has no kernel for this.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_product", "can_add_any_product", "can_add_products"]


@cache
def add_product() -> Any:
    """Return the op `(buffer, left, right)`: `buffer += left @ right` in one kernel."""

    @torch.library.custom_op("wholebatch::add_product", mutates_args=("buffer",))
    def operation(buffer: Tensor, left: Tensor, right: Tensor) -> None:
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)

    @operation.register_fake
    def _(buffer: Tensor, left: Tensor, right: Tensor) -> None:
        return

    del _
    return torch.ops.wholebatch.add_product.default


@cache
def can_add_products(device: torch.device) -> bool:
    """True if this device has the kernel and it adds correctly."""
    return device.type == "cuda" and _adds(device, torch.bfloat16, (32, 48, 64))


@cache
def can_add_any_product(device: torch.device) -> bool:
    """True if that also holds for eager code: odd sizes, fp16, no buffer yet."""
    return can_add_products(device) and all(
        _adds(device, dtype, sizes)
        for dtype in (torch.bfloat16, torch.float16)
        for sizes in ((32, 48, 64), (5, 7, 3), (1, 33, 17))
    )


def _adds(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]) -> bool:
    """Test the kernel on small integers, whose sums are exact in any order.

    It draws no random numbers, so the user's generators are left alone.
    """
    rows, inner, columns = sizes
    left, right, buffer = (
        torch.arange(high * wide, device=device).remainder(number).sub(3).reshape(high, wide)
        for number, (high, wide) in zip(
            (7, 5, 9), ((inner, rows), (inner, columns), (rows, columns)), strict=True
        )
    )
    wanted = (left.t().double() @ right.double()).float()
    buffer = buffer.float()
    before = buffer.clone()
    left, right = left.to(dtype).t(), right.to(dtype)
    try:
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)
        made = torch.mm(left, right, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(made, wanted) and torch.equal(buffer, wanted + before)
