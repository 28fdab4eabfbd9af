"""Symbolic sizes: one graph for micro-batches that differ in size only.

The first kind gets a graph for its exact shapes: if every micro-batch has the same shape, you get
the fastest graph. When a second kind with other sizes comes, the code is captured with those sizes
as symbols. Every question that the code, torch or the compiler asks about a symbol ("is it longer
than 512?") is recorded with its answer: a guard. The graph is valid for all sizes that give the
same answers, and for no others. Every later kind that it admits runs in it, so nothing is captured
or compiled again. Kinds whose sizes cannot be left open get graphs of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholebatch.compile.capture import OFFSET, Place, Program, is_offset
from wholebatch.compile.fusion import expression_of
from wholebatch.compile.graph_inputs import Inputs, Key


def pattern(key: Key) -> tuple[Hashable, ...]:
    """Return the key without sizes and strides; kinds with one pattern may share a graph."""
    return tuple(part.pattern for part in key)


def differing(inputs: Inputs, others: Sequence[Key]) -> tuple[tuple[Place, ...], ...]:
    """Return the dimensions to make symbols: those that differ between kinds, and the rows.

    Dimensions that were equal in every kind share one symbol: for example the rows of texts and
    labels.
    The rows are the first dimension of most tensors. A batch is split by rows: even if they have
    not differed so far, they will in a short last micro-batch.
    Sizes of 1 and 0 stay fixed: 1 broadcasts, 0 is empty, and both take other code paths.
    """
    kinds = [_shapes(key) for key in (inputs.key, *others)]
    columns: dict[tuple[int, ...], list[tuple[int, int]]] = {}
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
    return [tuple(part.shape) for part in key]


@dataclass
class Sizes:
    """The symbols of a program of open sizes, and the guards on them."""

    symbols: dict[Place, Any]
    """Each symbol by the place where its value is read."""
    _every: dict[Place, Any]
    _environment: Any

    @staticmethod
    def of(program: Program) -> Sizes:
        """Return the symbols of this program."""
        return Sizes(program.sizes, program.every_size, program.mode.shape_env)

    def numbers(self, inputs: Inputs) -> tuple[int, ...]:
        """Return the values of the symbols for this micro-batch."""
        return tuple(_number(place, inputs) for place in self.symbols)

    @property
    def any_open(self) -> bool:
        """True if the graph serves more than one kind.

        It does not if the code asked for the sizes themselves, or for a number computed from them,
        as a loop over the rows of all texts does.
        """
        still = {symbol.node._expr for symbol in self.symbols.values() if is_open(symbol)}
        return bool(still) and not any(_pins(g.expr, still) for g in self._environment.guards)

    @property
    def all_open(self) -> bool:
        return all(is_open(symbol) for place, symbol in self._every.items() if not is_offset(place))

    def value(self, size: Any, inputs: Inputs) -> Any:
        """Return the number, or the value of a symbolic expression for this micro-batch."""
        if not isinstance(size, (torch.SymInt, torch.SymFloat)):
            return size
        value = expression_of(size).subs(self._binding(inputs))
        return int(value) if isinstance(size, torch.SymInt) else float(value)

    def admit(self, inputs: Inputs) -> bool:
        """True if all that was asked about the symbols has the same answer for this micro-batch."""
        binding = self._binding(inputs)
        ranges = self._environment.var_to_range
        return all(
            bool(ranges[symbol].lower <= number) and bool(number <= ranges[symbol].upper)
            for symbol, number in binding.items()
        ) and all(_holds(guard.expr, binding) for guard in self._environment.guards)

    def _binding(self, inputs: Inputs) -> Mapping[Any, int]:
        return {
            symbol.node._expr: _number(place, inputs)
            for place, symbol in self._every.items()
            if isinstance(symbol, torch.SymInt)
        }

    def merge(self, graph: fx.Graph) -> int:
        """Read each size from the first inputs of the graph; return how many of these there are.

        As traced, the graph reads some sizes from a tensor where it needs them. That tensor would
        be kept alive until then, and an extra reader would prevent fusing it with its user.
        """
        known: dict[Any, fx.Node] = {}
        for node in list(graph.nodes):
            value = node.meta.get("val")
            if not isinstance(value, torch.SymInt):
                continue
            earlier = known.setdefault(expression_of(value), node)
            if earlier is not node and node.op == "call_function":
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)
        return len(self.symbols)


def _number(place: Place, inputs: Inputs) -> int:
    index, dim = place
    given = inputs.given[index]
    if dim == OFFSET:
        return int(given.storage_offset())
    return given.shape[dim] if dim > OFFSET else given.stride(OFFSET - 1 - dim)


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
