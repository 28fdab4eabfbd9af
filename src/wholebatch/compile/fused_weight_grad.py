"""Weight gradients that the matrix product itself adds into the gradient buffer.

Autograd computes the gradient of a linear layer's weight, `dW = dYᵀ X`, in the dtype of the
product, casts it, and adds it to `.grad`: three passes over the weight for every micro-batch, about
10 bytes per parameter. cuBLAS can save it, because its 16-bit products accept an fp32 addend. The
CPU has no kernel for this.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from wholebatch.compile.fusion import operation


@cache
def add_product() -> Any:
    """Return the op `(buffer, left, right)`: `buffer += left @ right` in one kernel.

    Inductor may pad the product that made the rows of `left` or `right`: they have gaps then.
    """

    def run(buffer: Tensor, left: Tensor, right: Tensor) -> None:
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)

    return operation("add_product", run, lambda *_: None, ("buffer",))


@cache
def can_add_products(device: torch.device) -> bool:
    """True if this device has the kernel."""
    if device.type != "cuda":
        return False
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    buffer = torch.zeros(16, 16, device=device)
    try:
        torch.addmm(buffer, ones, ones, out_dtype=torch.float32, out=buffer)
    except RuntimeError:
        return False
    return True
