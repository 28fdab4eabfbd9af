"""Helpers that recognise what a node of a traced graph does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

__all__ = [
    "PRODUCTS",
    "VIEWS",
    "Added",
    "added_into_buffer",
    "cast_to",
    "column_sum_into_buffer",
]

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
"""Operations that return a matrix in newly allocated memory."""


def cast_to(node: fx.Node) -> torch.dtype | None:
    """Return the target dtype if this node is a cast and nothing else."""
    if node.target is not aten._to_copy.default:
        return None
    dtype = node.kwargs.get("dtype")
    others = {k: v for k, v in node.kwargs.items() if k not in ("dtype", "layout", "device")}
    return dtype if isinstance(dtype, torch.dtype) and not any(others.values()) else None


@dataclass(frozen=True)
class Added:
    """The node that adds a gradient, and the buffer that it is added into."""

    addition: fx.Node
    buffer: fx.Node


def added_into_buffer(part: fx.Node) -> Added | None:
    """Return where this gradient is added into a buffer, if that is its only use."""
    while len(part.users) == 1:
        [user] = part.users
        if user.target is aten.add_.Tensor and user.args[1:] == (part,):
            buffer = user.args[0]
            assert isinstance(buffer, fx.Node)
            fits = buffer.op == "placeholder" and not user.kwargs and not user.users
            return Added(user, buffer) if fits else None
        if user.target is not aten.view.default and cast_to(user) is not torch.float32:
            return None
        part = user
    return None


def column_sum_into_buffer(node: fx.Node, columns: int) -> Added | None:
    """Return where the sum of its rows (the gradient of a bias) is added into a buffer."""
    for reader in (node, *(user for user in node.users if user.target is aten.view.default)):
        value = reader.meta.get("val")
        is_matrix = value is not None and value.dim() == 2 and value.shape[1] == columns
        for user in reader.users if is_matrix else ():
            if user.target is aten.sum.dim_IntList and user.args[1] == [0]:
                added = added_into_buffer(user)
                if added is not None:
                    return added
    return None
