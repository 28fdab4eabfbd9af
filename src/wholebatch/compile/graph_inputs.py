"""Micro-batches as inputs of a graph: copied to the device, flattened, with a key by shape.

A traced graph is valid for one shape, dtype and stride of every tensor: its `Key`. What the code
reads of the rest of a micro-batch is guarded (`guards.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wholebatch.batch import to_device
from wholebatch.batch.samples import Structure, flatten
from wholebatch.compile.execute_mode import CannotTrace

Key: TypeAlias = tuple[Hashable, ...]


@dataclass(frozen=True)
class Inputs:
    """The tensors of one micro-batch, in order, and the structure to rebuild it."""

    micro: Any
    """The micro-batch with these tensors."""
    tensors: tuple[Tensor, ...]
    key: Key
    _values: tuple[Any, ...]
    _structure: Structure

    def around(self, tensors: Sequence[Tensor]) -> Any:
        """Rebuild the micro-batch with these tensors instead of its own."""
        remaining = iter(tensors)
        return self._structure.build(
            [next(remaining) if isinstance(v, Tensor) else v for v in self._values]
        )


def take_apart(micro: Any) -> Inputs:
    """Return the micro-batch's tensors and key; raise CannotTrace if one of them is not dense."""
    leaves, structure = flatten(micro)
    parts: list[Hashable] = []
    values: list[Any] = []
    is_copied = False
    for leaf in leaves:
        value = leaf.value
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
                raise CannotTrace(
                    f"{leaf.name or 'the micro-batch'} is a {type(value).__name__} of layout "
                    f"{value.layout}, and a graph takes dense tensors"
                )
            # A slice of a wider tensor: its strides are not part of the kind.
            if not is_dense(value, memory_order(value)):
                value, is_copied = value.contiguous(), True
            parts.append((leaf.name, value.shape, value.dtype, value.stride(), value.device))
        values.append(value)
    tensors = tuple(value for value in values if isinstance(value, Tensor))
    inputs = Inputs(micro, tensors, tuple(parts), tuple(values), structure)
    return replace(inputs, micro=inputs.around(tensors)) if is_copied else inputs


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
