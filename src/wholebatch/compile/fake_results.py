"""Fake tensors as the results of operations: only shape, strides, dtype and device are known.

To compute one takes torch about 1 ms. The layers of a model repeat, and so do their operations:
there is one fake tensor of each kind, and an operation on tensors of the same kinds is computed
once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from wholebatch.compile.fusion import expression_of, fixed


class FakeResults:
    """Computes the fake results of operations, once for all that are alike."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self._fakes: dict[Any, Tensor] = {}
        self._known: dict[Any, Any] = {}

    def like(self, value: Any) -> Any:
        """Return the one fake tensor of the kind of this tensor, and another value as it is."""
        if not isinstance(value, Tensor):
            return value
        kind = kind_of(value)
        if kind not in self._fakes:
            with self.mode:
                self._fakes[kind] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
        return self._fakes[kind]

    def of(self, target: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return the result of this operation on nodes that have their values."""

        def fake(part: Any) -> Any:
            return mapped(part.meta["val"], self.like) if isinstance(part, fx.Node) else part

        def mark(part: Any) -> Any:
            return ("kind", id(part)) if isinstance(part, Tensor) else part

        given = mapped((args, dict(kwargs or {})), fake)
        key = target, fixed(mapped(given, mark))
        if key not in self._known:
            with self.mode, torch.no_grad():
                self._known[key] = mapped(target(*given[0], **given[1]), self.like)
        return self._known[key]

    def fill(self, node: fx.Node) -> None:
        """Give the node its value."""
        node.meta["val"] = self.of(node.target, node.args, node.kwargs)


def fake_mode() -> Any:
    """Return a new mode for fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def kind_of(value: Any) -> Any:
    """Return what must agree for two tensors to be exchanged in compiled code."""
    if isinstance(value, Tensor):
        shape, strides = map(expression_of, value.shape), map(expression_of, value.stride())
        return tuple(shape), tuple(strides), value.dtype, value.device
    return tuple(map(kind_of, value)) if isinstance(value, (list, tuple)) else repr(value)


def mapped(part: Any, function: Callable[[Any], Any]) -> Any:
    """Apply the function to every leaf of lists, tuples, dictionaries and slices."""
    if isinstance(part, (list, tuple)):
        return type(part)([mapped(one, function) for one in part])
    if isinstance(part, dict):
        return {name: mapped(one, function) for name, one in part.items()}
    if isinstance(part, slice):
        return slice(*(mapped(one, function) for one in (part.start, part.stop, part.step)))
    return function(part)
