"""The floating-point operations of a forward and a backward pass, by torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

aten = torch.ops.aten
_KERNELS = ("efficient", "flash", "cudnn")


def operation_counter() -> FlopCounterMode:
    """Return a context that counts operations, those of grouped-query attention too.

    The formulas of torch 2.11 want as many heads of keys and values as of queries.
    """
    counted = {}
    for kernel in _KERNELS:
        forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
        backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward")
        counted[forward] = _with_repeated_heads(flop_registry[forward], 0)
        counted[backward] = _with_repeated_heads(flop_registry[backward], 1)
    return FlopCounterMode(display=False, custom_mapping=counted)


def _with_repeated_heads(formula: Callable[..., int], query: int) -> Callable[..., int]:
    """Count keys and values, which follow the query, as if they were repeated for its heads."""

    def count(*shapes: Any, **_: Any) -> int:
        heads = shapes[query][1]
        repeated = [(shape[0], heads, *shape[2:]) for shape in shapes[query + 1 : query + 3]]
        return formula(*shapes[: query + 1], *repeated, *shapes[query + 3 :])

    return count
