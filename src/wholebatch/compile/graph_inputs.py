"""Micro-batches as inputs of a graph: copied to the device, flattened, with a key by shape.

A traced graph is valid for one shape, dtype and stride of every tensor: its `Key`. What the code
reads of the rest of a micro-batch is guarded (`guards.py`). A whole number that it reads (a step)
and that has changed becomes a size too: that of a tensor without elements. So it can be a symbol.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wholebatch.batch import to_device
from wholebatch.batch.samples import Structure, flatten
from wholebatch.compile.execute_mode import CannotTrace

Key: TypeAlias = tuple[Hashable, ...]
NUMBER = object()
"""Stands for a whole number of the micro-batch that is a size."""


@dataclass(frozen=True)
class Integer:
    """Stands for another whole number of the micro-batch."""

    name: str


@dataclass(frozen=True)
class Inputs:
    """The tensors of one micro-batch, in order, and the structure to rebuild it."""

    micro: Any
    """The micro-batch with these tensors."""
    tensors: tuple[Tensor, ...]
    """One of shape (0, n) stands for the number n."""
    key: Key
    numbers: Mapping[int, str]
    """The names of the numbers that are sizes, by their places among the tensors."""
    integers: Mapping[str, int]
    """The other whole numbers, by name."""
    _names: tuple[str, ...]
    _values: tuple[Any, ...]
    _structure: Structure

    def around(self, tensors: Sequence[Tensor]) -> Any:
        """Rebuild the micro-batch with these tensors instead of its own."""
        remaining = iter(tensors)
        values = []
        for value in self._values:
            if value is NUMBER:
                value = next(remaining).shape[1]
            elif isinstance(value, Tensor):
                value = next(remaining)
            values.append(value)
        return self._structure.build(values)

    def marked(self) -> Any:
        """Rebuild the micro-batch with `NUMBER` or an `Integer` for each whole number."""
        pairs = zip(self._names, self._values, strict=True)
        return self._structure.build([Integer(n) if type(v) is int else v for n, v in pairs])

    @property
    def without_numbers(self) -> Key:
        """The key of this kind, whatever its numbers are."""
        return without_numbers(self.key)


def without_numbers(key: Key) -> Key:
    """Return what kinds have in common that differ in their numbers only."""
    return tuple(part for part in key if not (isinstance(part, tuple) and part[0] is NUMBER))


def take_apart(micro: Any, sizes: Collection[str] = ()) -> Inputs:
    """Return the micro-batch's tensors and key; raise CannotTrace if one of them is not dense.

    Whole numbers with these names are `sizes`.
    """
    leaves, structure = flatten(micro)
    parts: list[Hashable] = []
    values: list[Any] = []
    tensors: list[Tensor] = []
    numbers, integers = {}, {}
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
            tensors.append(value)
        elif type(value) is int and not (leaf.name in sizes and 0 <= value < _LARGEST):
            integers[leaf.name] = value
        elif type(value) is int:
            numbers[len(tensors)] = leaf.name
            tensors.append(torch.empty((0, value)))
            parts.append((NUMBER, tensors[-1].shape, leaf.name, (), None))
            value = NUMBER
        values.append(value)
    names = tuple(leaf.name for leaf in leaves)
    key, held = tuple(parts), tuple(values)
    inputs = Inputs(micro, tuple(tensors), key, numbers, integers, names, held, structure)
    return replace(inputs, micro=inputs.around(tensors)) if is_copied else inputs


_LARGEST = 2**62
"""No size may be larger."""


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
