"""Fake tensors as the results of operations: only shape, strides, dtype and device are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from wholebatch.compile.fusion import expression_of


def like(mode: Any, value: Any) -> Any:
    """Return a fake tensor of this mode with the layout of a tensor; another value as it is."""
    if not isinstance(value, Tensor) or getattr(value, "fake_mode", None) is mode:
        return value
    with mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


def result_of(mode: Any, target: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return the fake result of this operation on nodes that have their values."""

    def fakes_of(part: Any) -> Any:
        value = part.meta["val"] if isinstance(part, fx.Node) else part
        return map_aggregate(value, lambda item: like(mode, item))

    args, kwargs = map_aggregate((args, dict(kwargs or {})), fakes_of)
    with mode, torch.no_grad():
        return target(*args, **kwargs)


def fill(mode: Any, node: fx.Node) -> None:
    """Give the node its fake value."""
    node.meta["val"] = result_of(mode, node.target, node.args, node.kwargs)


def kind_of(value: Any) -> Any:
    """Return what must agree for two tensors to be exchanged in compiled code."""
    if isinstance(value, Tensor):
        shape, strides = map(expression_of, value.shape), map(expression_of, value.stride())
        return tuple(shape), tuple(strides), value.dtype, value.device
    return tuple(map(kind_of, value)) if isinstance(value, (list, tuple)) else repr(value)
