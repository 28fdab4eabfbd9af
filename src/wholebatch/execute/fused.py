"""The weight gradient that adds itself: a 16-bit matrix product accumulated in an fp32 buffer.

`dW = dYᵀ X` in bf16 is written, read again, cast and added into the fp32 buffer: about 10 bytes of
traffic per parameter and micro-batch that cuBLAS can save, because its products take an fp32
addend. There is no kernel for it on the CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_product", "can_add_any_product", "can_add_products"]


@cache
def add_product() -> Any:
    """The operation `(buffer, left, right)`: buffer += left @ right, as one kernel."""

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
    """Whether this device has the kernel, and it adds rightly."""
    if device.type != "cuda":
        return False
    left = torch.randn(32, 48, device=device, dtype=torch.bfloat16)
    right = torch.randn(48, 64, device=device, dtype=torch.bfloat16)
    buffer = torch.ones(32, 64, device=device)
    wanted = left.double() @ right.double() + 1.0
    try:
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)
    except (RuntimeError, TypeError):
        return False
    return bool(((buffer - wanted).norm() / wanted.norm() < 1e-5).item())


@cache
def can_add_any_product(device: torch.device) -> bool:
    """Whether it also does so for what eager code brings: odd sizes, fp16, no buffer yet."""
    return can_add_products(device) and all(
        _adds(device, dtype, sizes)
        for dtype in (torch.bfloat16, torch.float16)
        for sizes in ((32, 48, 64), (5, 7, 3), (1, 33, 17))
    )


def _adds(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]) -> bool:
    rows, inner, columns = sizes
    left = torch.ones(inner, rows, device=device, dtype=dtype).t()
    right = torch.full((inner, columns), 0.5, device=device, dtype=dtype)
    buffer = torch.ones(rows, columns, device=device)
    try:
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)
        made = torch.mm(left, right, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    wanted = torch.full_like(buffer, 0.5 * inner)
    return bool(torch.equal(made, wanted) and torch.equal(buffer, wanted + 1.0))
