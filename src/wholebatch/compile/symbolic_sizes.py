"""Symbolic sizes: one graph for micro-batches that differ in size only.

The first kind gets a graph for its exact shapes: if every micro-batch has the same shape, you get
the fastest graph. When a second kind with other sizes comes, a graph is traced with those sizes as
symbols. Every question that the code, torch or the compiler asks about a symbol ("is it longer than
512?") is recorded with its answer: a guard. The graph is valid for all sizes that give the same
answers, and for no others. Every later kind that it admits runs in it, so nothing is traced or
compiled again. Kinds whose sizes cannot be left open get graphs of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from wholebatch.compile.fusion import expression_of
from wholebatch.compile.graph_inputs import Inputs, Key, dense_strides, is_dense, memory_order

Place: TypeAlias = tuple[int, int]
"""The index of a tensor of a micro-batch, and one of its dimensions."""


def pattern(key: Key) -> Key:
    """Return the key without sizes and strides; kinds with one pattern may share a graph."""
    parts: Iterable[Any] = key
    return tuple((p[0], len(p[1]), p[2], p[4]) if _is_tensor(p) else p for p in parts)


def differing(inputs: Inputs, others: Sequence[Key]) -> tuple[tuple[Place, ...], ...]:
    """Return the dimensions to make symbols: those that differ between kinds, and the rows.

    Dimensions that were equal in every kind share one symbol: for example the rows of texts and
    labels.
    The rows are the first dimension of most tensors. A batch is split by rows: even if they have
    not differed so far, they will in a short last micro-batch.
    Sizes of 1 and 0 stay fixed: 1 broadcasts, 0 is empty, and both take other code paths.
    Numbers of the batch have a symbol each.
    """
    kinds = [_shapes(key) for key in (inputs.key, *others)]
    numbers = [((which, 1),) for which in inputs.numbers if kinds[0][which][1] > 1]
    columns: dict[tuple[int, ...], list[Place]] = {}
    for which, shape in enumerate(kinds[0]):
        for dim in range(0 if which in inputs.numbers else len(shape)):
            column = tuple(kind[which][dim] for kind in kinds)
            columns.setdefault(column, []).append((which, dim))
    if all(len(set(column)) == 1 for column in columns):
        return tuple(numbers)
    rows = max(columns, key=lambda column: sum(dim == 0 for _, dim in columns[column]))
    groups = (
        tuple(place for place in places if len(set(column)) > 1 or place[1] == 0)
        for column, places in columns.items()
        if column[0] > 1 and (len(set(column)) > 1 or column == rows)
    )
    return (*groups, *numbers)


def _shapes(key: Key) -> list[tuple[int, ...]]:
    parts: Iterable[Any] = key
    return [tuple(part[1]) for part in parts if _is_tensor(part)]


def _is_tensor(part: Any) -> bool:
    return isinstance(part, tuple) and isinstance(part[1], torch.Size)


@dataclass
class Sizes:
    """Fake tensors that stand for those of micro-batches, with symbols at these places."""

    places: tuple[tuple[Place, ...], ...]
    tensors: list[Tensor]
    symbols: list[Any]
    """One symbol for each group of places."""
    _environment: Any
    mode: Any
    """The mode of the fake tensors."""
    _hints: tuple[int, ...]
    _orders: list[list[int]]
    _names: Mapping[int, str]
    """The names of numbers, by the places of the tensors that stand for them."""
    flat: list[Tensor] = field(default_factory=list)
    """The fake tensors that the graph was traced with, in the order of its inputs."""

    @staticmethod
    def of(inputs: Inputs, places: tuple[tuple[Place, ...], ...]) -> Sizes:
        """Create symbols at these `places`, with the sizes of this micro-batch as hints."""
        # These modules are slow to import: paid only when tracing.
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        environment: Any = ShapeEnv(
            allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
        )
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
            orders.append(memory_order(tensor))
            shape = [at.get((which, dim), size) for dim, size in enumerate(tensor.shape)]
            strides = dense_strides(shape, orders[-1])
            with mode:
                tensors.append(
                    torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
                )
        return Sizes(places, tensors, symbols, environment, mode, numbers, orders, inputs.numbers)

    def fake(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor for a tensor of the model, with fixed sizes."""
        fake: Tensor = self.mode.from_tensor(tensor, static_shapes=True)
        return fake

    def numbers(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the values of the symbols for this micro-batch."""
        return _numbers(self.places, tensors)

    @property
    def any_open(self) -> bool:
        """True if the graph serves more than one kind.

        It does not if the code asked for the sizes themselves, or for a number computed from them,
        as a loop over the rows of all texts does.
        """
        still = {symbol.node._expr for symbol in self.symbols if is_open(symbol)}
        return bool(still) and not any(_pins(g.expr, still) for g in self._environment.guards)

    def numbers_of_batch(self, *, are_open: bool) -> list[str]:
        """Return the names of the batch's numbers that are symbols still, or no longer."""
        return [
            self._names[place[0]]
            for places, symbol in zip(self.places, self.symbols, strict=True)
            for place in places
            if place[0] in self._names and is_open(symbol) == are_open
        ]

    def value(self, size: Any, tensors: Sequence[Tensor] | None = None) -> Any:
        """Return the number, or the value of a symbolic expression for this micro-batch."""
        if not isinstance(size, (torch.SymInt, torch.SymFloat)):
            return size
        numbers = self._hints if tensors is None else self.numbers(tensors)
        value = expression_of(size).subs(self._binding(numbers))
        return int(value) if isinstance(size, torch.SymInt) else float(value)

    def admit(self, tensors: Sequence[Tensor]) -> bool:
        """True if the graph is valid for this micro-batch, which has the same pattern."""
        numbers = self.numbers(tensors)
        at = {place: numbers[i] for i, group in enumerate(self.places) for place in group}
        for which, (tensor, fake) in enumerate(zip(tensors, self.tensors, strict=True)):
            wanted = tuple(at.get((which, dim), size) for dim, size in enumerate(fake.shape))
            if tensor.shape != wanted or not is_dense(tensor, self._orders[which]):
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
        """Make the symbols the first inputs of the graph; return how many there are.

        As traced, the graph reads each size from some tensor where it needs it. That tensor would
        be kept alive until then, and an extra reader would prevent fusing it with its user.
        """
        first = next(iter(graph.nodes))
        known: dict[Any, fx.Node] = {}
        for index, symbol in enumerate(self.symbols):
            with graph.inserting_before(first):
                node = graph.placeholder(f"size_{index}")
            node.meta["val"] = symbol
            known.setdefault(expression_of(symbol), node)
        for node in list(graph.nodes):
            value = node.meta.get("val")
            if node.op != "call_function" or not isinstance(value, torch.SymInt):
                continue
            earlier = known.setdefault(expression_of(value), node)
            if earlier is not node:
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)
        return len(self.symbols)


def _numbers(places: Sequence[Sequence[Place]], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensors[group[0][0]].shape[group[0][1]] for group in places)


def is_open(symbol: Any) -> bool:
    return not getattr(expression_of(symbol), "is_number", True)


def _pins(guard: Any, symbols: set[Any]) -> bool:
    """True if the guard fixes the value of a polynomial of these symbols."""
    if getattr(guard, "rel_op", None) != "==" or not guard.free_symbols & symbols:
        return False
    sides = [side for side in guard.args if not side.is_number]
    return len(sides) == 1 and bool(sides[0].is_polynomial())


def _holds(guard: Any, binding: Mapping[Any, int]) -> bool:
    try:
        return bool(guard.subs(binding))
    # The guard is about something else than our symbols.
    except (TypeError, ValueError, ArithmeticError):
        return False
