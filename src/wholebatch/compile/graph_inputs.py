"""Micro-batches as inputs of a graph: copied to the device, flattened, with a key by shape.

A graph is valid for one shape, dtype and stride of every tensor: its `Key`. What the code reads of
the rest of a micro-batch is guarded (`guards.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wholebatch.batch import to_device
from wholebatch.batch.samples import Structure, flatten
from wholebatch.compile.execute_mode import CannotTrace


@dataclass(frozen=True)
class TensorPart:
    """A tensor of a micro-batch: where two of these are equal, one graph runs both tensors."""

    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    has_gaps: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def pattern(self) -> Hashable:
        """The part without sizes: where it is equal, a graph whose sizes are open may run both."""
        return self.name, len(self.shape), self.has_gaps, self.dtype, self.device


Key: TypeAlias = tuple[TensorPart, ...]


@dataclass(frozen=True)
class Inputs:
    """The tensors of one micro-batch, in order, and the structure to rebuild it."""

    micro: Any
    """The micro-batch as it was given."""
    given: tuple[Tensor, ...]
    """Its tensors."""
    tensors: tuple[Tensor, ...]
    """Its tensors for a graph: copies of those that have gaps in memory."""
    key: Key
    _values: tuple[Any, ...]
    _structure: Structure

    def rebuilt(self) -> Any:
        """Return the micro-batch in new containers."""
        return self._structure.build(list(self._values))


def take_apart(micro: Any) -> Inputs:
    """Return the micro-batch's tensors and key; raise CannotTrace if a graph cannot take one."""
    leaves, structure = flatten(micro)
    parts: list[TensorPart] = []
    given: list[Tensor] = []
    tensors: list[Tensor] = []
    for leaf in leaves:
        value = leaf.value
        if isinstance(value, Tensor):
            name = leaf.name or "the micro-batch"
            if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
                raise CannotTrace(
                    f"{name} is a {type(value).__name__} of layout {value.layout}, and a graph "
                    "takes dense tensors"
                )
            if value.requires_grad:
                raise CannotTrace(f"{name} requires a gradient, which a graph would not give it")
            dense = is_dense(value, memory_order(value))
            parts.append(
                TensorPart(
                    leaf.name, value.shape, value.stride(), not dense, value.dtype, value.device
                )
            )
            given.append(value)
            tensors.append(value if dense else value.contiguous())
    return Inputs(
        micro,
        tuple(given),
        tuple(tensors),
        tuple(parts),
        tuple(leaf.value for leaf in leaves),
        structure,
    )


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions in memory order, the innermost first."""
    return sorted(
        range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim], -dim)
    )


def dense_strides(shape: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Return the strides without gaps for dimensions in this memory order."""
    strides, expected = [0] * len(shape), 1
    for dim in order:
        strides[dim] = expected
        expected *= shape[dim]
    return strides


def is_dense(tensor: Tensor, order: Sequence[int]) -> bool:
    """True if the elements fill one block of memory, with the dimensions in this order."""
    return all(
        size <= 1 or stride == wanted
        for size, stride, wanted in zip(
            tensor.shape, tensor.stride(), dense_strides(tensor.shape, order), strict=True
        )
    )


class DeviceCopies:
    """Copies micro-batches to one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, micro: Any) -> Any:
        """Return the micro-batch on the device, ready for later work on the current stream."""
        if self._device.type != "cuda":
            return to_device(micro, self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = to_device(micro, self._device)
        if moved is micro:
            return micro
        current.wait_stream(self._stream)
        for leaf in flatten(moved)[0]:
            if isinstance(leaf.value, Tensor) and leaf.value.is_cuda:
                leaf.value.record_stream(current)
        return moved
