"""A graph is used only after it gave what eager code gave, on a micro-batch of the user's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["differs"]


@torch.no_grad()
def differs(
    found: Sequence[Tensor], wanted: Sequence[Tensor], what: str, *, sixteen_bit: bool
) -> str | None:
    """Why `found` is not `wanted` but for rounding, or None.

    The limits are wide: rounding differs between kernels, and an ill-conditioned model enlarges
    it. What is looked for is another function, which differs in the first digit.
    """
    if len(found) != len(wanted):
        return f"it gives {len(found)} tensors of {what} where eager code gives {len(wanted)}"
    dtype = wanted[0].dtype
    allowed = 0.1 if sixteen_bit else 1e-6 if dtype is torch.float64 else 1e-2
    above = _norm([a.to(b.dtype) - b for a, b in zip(found, wanted, strict=True)])
    below = _norm(list(wanted))
    if not above < float("inf") or not below < float("inf") or below == 0.0:
        return None  # not finite in eager code either, or nothing to compare
    if above <= allowed * below:
        return None
    return f"its {what} differs from that of eager code by {above / below:.1e} of it"


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(t.double()) for t in tensors]).norm())
