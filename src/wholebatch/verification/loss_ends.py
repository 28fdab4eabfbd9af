"""Where the terms of a loss end in its graph, and the numbers that scale them.

Between a loss and its terms lie only operations on single numbers. The graph is followed that far:
`(F.cross_entropy(logits, labels) + 0.1 * penalty.mean()) / 4` has two terms, both divided by 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from torch import nn
from torch.autograd.function import BackwardCFunction

from wholebatch.audit.scalar_graph import number_of, saved_by

# Operations that pass one number on, up to its sign. `where` is how mean_loss leaves out a mean
# over no units.
_PASS = {
    *("Neg", "Rsub", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"),
    *("Permute", "T", "Alias", "Clone", "NanToNum", "Where"),
}
_OF_PARAMETERS = {
    *("Pow", "Abs", "Exp", "Log", "Neg", "Mul", "Div", "Add", "Sub", "Rsub", "Sum", "Mean", "Sqrt"),
    *("Select", "Slice", "Unsqueeze", "Squeeze", "View", "LinalgVectorNorm", "Norm", "Clamp", "T"),
    *("Softplus", "Sigmoid", "Tanh", "Reciprocal", "Permute", "Clone", "ToCopy", "Stack", "Cat"),
}
DDP_SINK = "_DDPSinkBackward"
"""The node through which DistributedDataParallel returns the outputs of its model."""
_MOST_NODES = 512
_ROWS = ("Stack", "Cat", "Unsqueeze", "View", "ReshapeAlias", "Expand")
"""Operations that put single numbers in a row."""
TOO_LARGE = f"a graph of more than {_MOST_NODES} nodes"

Scales = tuple["Scale", ...]
"""The scales on top of a term, the outermost first."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A number by which a term is multiplied or divided."""

    operation: Literal["multiplied", "divided"]
    by: float


def ends_of(root: Any) -> Iterator[tuple[Any, Scales]]:
    """Yield the nodes where the terms of a scalar end, each with the scales on top of it.

    A loss is followed through single numbers, as long as it is linear in them. `root` is the
    scalar's node. A graph that is too large ends in None.
    """
    waiting: list[tuple[Any, Scales]] = [(_without_sink(root, 0), ())]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node, scales = waiting.pop()
        inner = scaled(node)
        below = [inner[0]] if inner is not None else numbers_below(node)
        if not below or (inner is not None and shape_of(inner[0])):
            yield node, scales
            continue
        for child, weight in zip(below, _weights_in(node, len(below)), strict=True):
            by = inner[1] if inner is not None else weight
            waiting.append((child, scales if by is None else (*scales, by)))
    yield None, ()


def numbers_below(node: Any) -> list[Any]:
    """Return the single numbers that a node adds or passes on; none if it does anything else."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    operation = operation_of(node)
    if operation in ("Mean", "Sum") and len(edges) == 1 and shape_of(*edges[0]):
        inner = _without_sink(*edges[0])  # of numbers in a row: torch.stack(losses).sum()
        numbers = numbers_below(inner) if operation_of(inner) in _ROWS else []
        return numbers if shape_of(*edges[0]) == (len(numbers),) else []
    if not edges or any(shape_of(*edge) for edge in edges) or _is_curved(node):
        row = [_without_sink(*edge) for edge in edges]
        inside = [numbers_below(child) if operation_of(child) in _ROWS else [] for child in row]
        return list(chain(*inside)) if operation in _ROWS and inside and all(inside) else []
    return [_without_sink(*edge) for edge in edges]


def _is_curved(node: Any) -> bool:
    """True if a node of single numbers is no sum of them: it keeps them for its derivative."""
    kept = [saved_by(node, name) for name in ("self", "result", "other", "exponent")]
    return operation_of(node) not in _PASS and any(value is not None for value in kept)


def _weights_in(node: Any, count: int) -> list[Scale | None]:
    """Return by what a node multiplies each of the numbers that it adds."""
    alpha = float(getattr(node, "_saved_alpha", 1))
    if operation_of(node) in ("Add", "Sub") and count == 2 and alpha != 1:
        return [None, Scale("multiplied", abs(alpha))]
    if operation_of(node) == "Mean" and count > 1:
        return [Scale("divided", float(count))] * count
    return [None] * count


def _without_sink(node: Any, place: int) -> Any:
    while node is not None and node.name() == DDP_SINK:
        node, place = node.next_functions[place]
    return node


def operands_of(node: Any) -> list[Any]:
    """Return the nodes that made the operands of a node; None for one without a gradient."""
    return [_without_sink(*edge) for edge in node.next_functions]


def operation_of(node: Any) -> str:
    """Return `Mul` for `MulBackward0`; "" for a custom function, whatever its class is called."""
    return "" if isinstance(node, BackwardCFunction) else str(node.name().partition("Backward")[0])


def passes_on(node: Any) -> bool:
    """True if a node passes on what one operand holds, up to a constant and its sign."""
    return operation_of(node) in _PASS or node.name() in ("AddBackward1", "SubBackward1")


def scaled(node: Any) -> tuple[Any, Scale] | None:
    """Return the operand of a product with, or a quotient by, a number, and that scale."""
    operation, below = operation_of(node), operands_of(node)
    inputs = [child for child in below if child is not None]
    operands = [child for child in inputs if not is_of_parameters(child)] or inputs
    is_first = operands == below[:1]
    if operation not in ("Mul", "Div") or len(operands) != 1:
        return None
    by = number_of(saved_by(node, "other" if is_first else "self"))
    if operation == "Mul":
        return None if by is None else (operands[0], Scale("multiplied", abs(by)))
    return (operands[0], Scale("divided", abs(by))) if by and is_first else None


def is_of_parameters(node: Any) -> bool:
    """True for what is made of parameters alone: no sample takes part."""
    waiting = [node]
    for _ in range(_MOST_NODES):
        if not waiting:
            return True
        node = waiting.pop()
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            continue
        name = "" if node is None else operation_of(node)
        below = operands_of(node) if name in _OF_PARAMETERS else []
        other = saved_by(node, "other" if below[:1] != [None] else "self") if None in below else 1
        ours = [child for child in below if child is not None]
        if name in ("Add", "Sub", "Rsub"):  # of a number, or of samples: those make it larger
            other = 1 if len({shape_of(operand) for operand in (node, *ours)}) == 1 else other
        if not below or number_of(other) is None:
            return False
        waiting += ours
    return False


def shape_of(node: Any, place: int = 0) -> tuple[int, ...]:
    """Return the shape of what a node has computed."""
    return tuple(node._input_metadata[place].shape)
