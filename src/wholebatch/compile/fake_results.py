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

from wholebatch.compile.fusion import expression_of


class FakeResults:
    """Computes the fake results of operations, once for all that are alike."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self._fakes: dict[Any, Tensor] = {}
        self._own: set[int] = set()
        self._known: dict[Any, Any] = {}

    def like(self, value: Any) -> Any:
        """Return the one fake tensor of the kind of this tensor, and another value as it is."""
        if id(value) in self._own or not isinstance(value, Tensor):
            return value
        kind = kind_of(value)
        if kind not in self._fakes:
            shape, strides, dtype, device = value.shape, value.stride(), value.dtype, value.device
            with self.mode:
                made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            self._fakes[kind] = made
            self._own.add(id(made))
        return self._fakes[kind]

    def of(self, target: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return the result of this operation on nodes that have their values."""
        key: list[Any] = [id(target)]
        given = self._given((args, dict(kwargs or {})), key)
        alike = tuple(key)
        if alike not in self._known:
            with self.mode, torch.no_grad():
                self._known[alike] = mapped(target(*given[0], **given[1]), self.like)
        return self._known[alike]

    def _given(self, part: Any, key: list[Any]) -> Any:
        """Return arguments with fakes for nodes; add to the key what the result depends on."""
        if isinstance(part, fx.Node):
            part = mapped(part.meta["val"], self.like)
        if isinstance(part, Tensor):
            key.append(id(part))
            return part
        key.append(type(part))  # It tells 1 from 1.0 and True.
        if isinstance(part, (list, tuple)):
            key.append(len(part))
            return type(part)([self._given(one, key) for one in part])
        if isinstance(part, dict):
            key.extend(part)
            return {name: self._given(one, key) for name, one in part.items()}
        key.append(repr(part))
        return part

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
