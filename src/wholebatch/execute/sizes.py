"""Sizes that a graph leaves open: symbols in the place of numbers, and what they may be.

A graph of one kind of micro-batch holds for its very shapes. Here some dimensions of the tensors
are symbols while the model's Python runs, and the graph computes with them. Whatever that Python,
torch or the compiler asks of a symbol ("is it longer than 512?") is kept with the answer; the graph
holds for all sizes that give the same answers, and for no others.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from wholebatch.execute.inputs import Inputs, Key

__all__ = ["Place", "Sizes", "differing", "lens_stay_open", "pattern", "same_shape"]

aten = torch.ops.aten
_LEN = builtins.len
_ONE_AT_A_TIME = threading.Lock()

Place: TypeAlias = tuple[int, int]
"""Which tensor of a micro-batch, and which of its dimensions."""


def pattern(key: Key) -> Key:
    """The key without sizes and strides: what kinds that may share a graph have in common."""
    parts: Iterable[Any] = key
    return tuple((p[0], len(p[1]), p[2], p[4]) if _is_tensor(p) else p for p in parts)


def differing(inputs: Inputs, others: Sequence[Key]) -> tuple[tuple[Place, ...], ...]:
    """The dimensions that are to be symbols: those in which kinds of one pattern differ, and rows.

    Dimensions that were the same number in every kind are one symbol: the rows of texts and labels.
    The rows are the first dimension of most tensors. They are what a batch is split by: if they
    have not differed so far, they will in a short last micro-batch.
    What is 1 or 0 here stays so: a size of 1 is broadcast, and one of 0 is nothing, by other code.
    """
    kinds = [_shapes(key) for key in (inputs.key, *others)]
    columns: dict[tuple[int, ...], list[Place]] = {}
    for which, shape in enumerate(kinds[0]):
        for dim in range(len(shape)):
            column = tuple(kind[which][dim] for kind in kinds)
            columns.setdefault(column, []).append((which, dim))
    if all(len(set(column)) == 1 for column in columns):
        return ()
    rows = max(columns, key=lambda column: sum(dim == 0 for _, dim in columns[column]))
    return tuple(
        tuple(place for place in places if len(set(column)) > 1 or place[1] == 0)
        for column, places in columns.items()
        if column[0] > 1 and (len(set(column)) > 1 or column == rows)
    )


def _shapes(key: Key) -> list[tuple[int, ...]]:
    parts: Iterable[Any] = key
    return [tuple(part[1]) for part in parts if _is_tensor(part)]


def _is_tensor(part: Any) -> bool:
    return isinstance(part, tuple) and isinstance(part[1], torch.Size)


def same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether they are the same in every case, asking nothing of a symbol."""
    return len(one) == len(other) and all(map(_same_size, one, other))


def _same_size(one: Any, other: Any) -> bool:
    return bool(_expression(one) == _expression(other))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size


@dataclass
class Sizes:
    """Tensors that stand for those of micro-batches, with symbols at these places."""

    places: tuple[tuple[Place, ...], ...]
    tensors: list[Tensor]
    symbols: list[Any]
    """One for each group of places."""
    _environment: Any
    _mode: Any
    _hints: tuple[int, ...]
    _orders: list[list[int]]
    flat: list[Tensor] = field(default_factory=list)
    """What the graph was traced with, in the order of its inputs."""

    @staticmethod
    def of(inputs: Inputs, places: tuple[tuple[Place, ...], ...]) -> Sizes:
        """Symbols in the `places`, whose numbers are for now those of this micro-batch."""
        # These modules are slow to import, and only who traces pays for it.
        from torch._dynamo.source import ConstantSource
        from torch._functorch import config
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        environment: Any = ShapeEnv(
            allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
        )
        with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            mode = FakeTensorMode(
                allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=environment
            )
        numbers = _numbers(places, inputs.tensors)
        symbols = []
        for index, number in enumerate(numbers):
            source = ConstantSource(f"size_{index}")
            symbol = environment.create_symbol(number, source, DimDynamic.DYNAMIC)
            symbols.append(environment.create_symintnode(symbol, hint=number, source=source))
        at = {place: symbols[i] for i, group in enumerate(places) for place in group}
        tensors, orders = [], []
        for which, tensor in enumerate(inputs.tensors):
            orders.append(_order(tensor))
            shape = [at.get((which, dim), size) for dim, size in enumerate(tensor.shape)]
            strides = _dense(shape, orders[-1])
            with mode:
                tensors.append(
                    torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
                )
        return Sizes(places, tensors, symbols, environment, mode, numbers, orders)

    def fake(self, tensor: Tensor) -> Tensor:
        """A stand-in for a tensor of the model, whose sizes are numbers."""
        made: Tensor = self._mode.from_tensor(tensor, static_shapes=True)
        return made

    def alike(self, tensor: Tensor) -> Tensor:
        """A stand-in for a tensor that shares memory with others, but no element: for itself."""
        with self._mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )

    def numbers(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """What the symbols are for this micro-batch."""
        return _numbers(self.places, tensors)

    @property
    def any_open(self) -> bool:
        """Whether a graph of it serves more than one kind.

        Not if the code has asked for the numbers themselves, or for one that is made of them, as a
        loop over the rows of all texts does.
        """
        still = {symbol.node._expr for symbol in self.symbols if _is_open(symbol)}
        return bool(still) and not any(_pins(g.expr, still) for g in self._environment.guards)

    @property
    def all_open(self) -> bool:
        """Whether no symbol has become a number."""
        return all(map(_is_open, self.symbols))

    def value(self, size: Any, tensors: Sequence[Tensor] | None = None) -> Any:
        """A number, or the number that something made of symbols is for this micro-batch."""
        if not isinstance(size, (torch.SymInt, torch.SymFloat)):
            return size
        numbers = self._hints if tensors is None else self.numbers(tensors)
        value = _expression(size).subs(self._binding(numbers))
        return int(value) if isinstance(size, torch.SymInt) else float(value)

    def admit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph holds for micro-batches like this one, of the same pattern."""
        numbers = self.numbers(tensors)
        at = {place: numbers[i] for i, group in enumerate(self.places) for place in group}
        for which, (tensor, fake) in enumerate(zip(tensors, self.tensors, strict=True)):
            for dim, size in enumerate(fake.shape):
                wanted = at.get((which, dim), size)
                if tensor.shape[dim] != wanted:
                    return False
            ordered = _dense(tensor.shape, self._orders[which])
            if any(
                size > 1 and stride != wanted
                for size, stride, wanted in zip(tensor.shape, tensor.stride(), ordered, strict=True)
            ):
                return False
        binding = self._binding(numbers)
        ranges = self._environment.var_to_range
        return all(
            bool(ranges[symbol].lower <= number) and bool(number <= ranges[symbol].upper)
            for symbol, number in binding.items()
        ) and all(_holds(guard.expr, binding) for guard in self._environment.guards)

    def _binding(self, numbers: Sequence[int]) -> Mapping[Any, int]:
        symbols = (symbol.node._expr for symbol in self.symbols)
        return dict(zip(symbols, numbers, strict=True))

    def as_inputs(self, graph: fx.Graph) -> int:
        """Make the symbols the first inputs of a graph that reads them off its tensors; how many.

        It reads them where they are needed, off whatever tensor has them, which then has to be held
        for that long; and one that is read by more than its user could not be fused with it.
        """
        first = next(iter(graph.nodes))
        known: dict[Any, fx.Node] = {}
        for index, symbol in enumerate(self.symbols):
            with graph.inserting_before(first):
                node = graph.placeholder(f"size_{index}")
            node.meta["val"] = symbol
            known.setdefault(_expression(symbol), node)
        for node in list(graph.nodes):
            value = node.meta.get("val")
            if node.op != "call_function" or not isinstance(value, torch.SymInt):
                continue
            earlier = known.setdefault(_expression(value), node)
            if earlier is not node:
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)
        return len(self.symbols)


def _numbers(places: Sequence[Sequence[Place]], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensors[group[0][0]].shape[group[0][1]] for group in places)


def _order(tensor: Tensor) -> list[int]:
    """Its dimensions as they lie in memory, the innermost first."""
    return sorted(
        range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim], -dim)
    )


def _dense(shape: Sequence[Any], order: Sequence[int]) -> list[Any]:
    strides, expected = [0] * len(shape), 1
    for dim in order:
        strides[dim] = expected
        expected *= shape[dim]
    return strides


def _is_open(symbol: Any) -> bool:
    return not getattr(_expression(symbol), "is_number", True)


def _pins(guard: Any, symbols: set[Any]) -> bool:
    """Whether it says which number a sum or product of these symbols is."""
    if getattr(guard, "rel_op", None) != "==" or not guard.free_symbols & symbols:
        return False
    sides = [side for side in guard.args if not side.is_number]
    return len(sides) == 1 and bool(sides[0].is_polynomial())


def _holds(guard: Any, binding: Mapping[Any, int]) -> bool:
    try:
        return bool(guard.subs(binding))
    except (TypeError, ValueError, ArithmeticError):  # of something else than our symbols
        return False


@contextmanager
def lens_stay_open() -> Iterator[None]:
    """Within it, `len(tensor)` may be a symbol; Python's own makes it a number, for good."""
    plain = _LEN

    def length(of: Any, /) -> Any:
        if isinstance(of, Tensor) and of.dim() and isinstance(of.shape[0], torch.SymInt):
            return of.shape[0]
        return plain(of)

    with _ONE_AT_A_TIME:
        builtins.len = length
        try:
            yield
        finally:
            builtins.len = plain
