"""Gradients of a layer that was split, joined again, with the gradient of its bias on the way.

A layer whose output is split in three (queries, keys and values) has its gradient joined from
three, and the sum of the joined rows is the gradient of its bias. As one operation they are read
once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from wholebatch.execute.nodes import SIXTEEN_BIT, column_sum_into_buffer
from wholebatch.execute.sizes import same_shape

__all__ = ["can_fuse_joining", "fuse_joining"]

aten = torch.ops.aten
_PARTS = 3


@cache
def _operation() -> Any:
    """`(parts, sum)`: the parts side by side; the sum of the rows is added to it."""

    @torch.library.custom_op("wholebatch::join_", mutates_args=("bias_sum",))
    def operation(parts: list[Tensor], bias_sum: Tensor) -> Tensor:
        parts = [part.contiguous() for part in parts]
        if not bias_sum.is_cuda:
            return _by_operations(parts, bias_sum)
        from wholebatch.execute.joining_kernel import launch

        return launch(parts, bias_sum)

    @operation.register_fake
    def _(parts: list[Tensor], bias_sum: Tensor) -> Tensor:
        return torch.cat(parts, -1)

    del _
    return torch.ops.wholebatch.join_.default


def _by_operations(parts: list[Tensor], bias_sum: Tensor) -> Tensor:
    """What the kernel does, written down: for the CPU, and to hold the kernel against."""
    made = torch.cat(parts, -1)
    bias_sum += made.to(bias_sum.dtype).reshape(-1, made.shape[-1]).sum(0)
    return made


@cache
def can_fuse_joining(device: torch.device) -> bool:
    """Whether this device has the kernel, and it computes rightly."""
    if device.type != "cuda":
        return False
    try:
        from wholebatch.execute.joining_kernel import launch
    except ImportError:
        return False
    numbers = torch.arange(67 * 300, device=device).remainder(7).sub(3)  # nothing is drawn
    parts = [(numbers + more).reshape(67, 300).bfloat16() for more in range(_PARTS)]
    sums = torch.ones(2, 900, device=device)
    try:
        found = launch(parts, sums[0])
    except Exception:  # whatever a compiler raises, the plain way is there
        return False
    return torch.equal(found, _by_operations(parts, sums[1])) and torch.equal(sums[0], sums[1])


def fuse_joining(graph: fx.Graph) -> int:
    """Put the operation where joined gradients are summed for a bias; how many did.

    Gradients must have been added into their buffers. What it replaces is left to be eliminated.
    """
    fused = 0
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        value, parts = node.meta["val"], node.args[0]
        dim = node.args[1] if len(node.args) > 1 else 0
        if not isinstance(parts, (list, tuple)) or len(parts) != _PARTS:
            continue
        if dim not in (-1, value.dim() - 1) or value.dtype not in SIXTEEN_BIT:
            continue
        values = [part.meta["val"] for part in parts if isinstance(part, fx.Node)]
        first = values[0]
        if not isinstance(value.shape[-1], int) or not all(
            one.dtype is value.dtype and one.is_contiguous() and same_shape(one.shape, first.shape)
            for one in values
        ):
            continue
        added = column_sum_into_buffer(node, value.shape[-1])
        if added is None:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(_operation(), (list(parts), added.buffer))
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(added.addition)
        fused += 1
    return fused
