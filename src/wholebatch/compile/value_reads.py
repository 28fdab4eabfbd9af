"""The values that a model's Python reads from tensors while it is traced (`if x < 0`, `.item()`).

A graph is right only for the path that its trace took. So a value is read only if it can never be
another one: it is computed from constants alone, or it compares a uniform random number with a
bound that no such number crosses (LayerDrop with a probability of 0). All others stay symbols, and
a decision by one of them ends the trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from wholebatch.compile.fusion import drop_unused

aten = torch.ops.aten

SMALL = 16
"""The size up to which the values of a tensor may be read in a trace."""
_UNIFORM = (aten.rand.default, aten.rand_like.default)
_COMPARISONS = {
    aten.lt.Scalar: (False, True),
    aten.le.Scalar: (False, True),
    aten.gt.Scalar: (True, False),
    aten.ge.Scalar: (True, False),
}
"""The results for a bound below all uniform numbers, and for one above all of them."""


class ValueReads:
    """Answers reads of values that can never change; remembers the nodes that it answered for."""

    def __init__(self) -> None:
        self.settled: set[str] = set()
        self.sources: list[Tensor] = []
        """Tensors from outside of the graph whose values it contains; all others are read live."""
        self.any_source = False
        """True if it contains a value that was computed from one of them, nobody knows which."""

    def answer(self, func: Any, args: Any) -> Any:
        """Return the value that is read, if it can never change; else NotImplemented."""
        if func is aten._local_scalar_dense.default:
            node, root = node_of(args[0])
            self.any_source |= node is None
            value = None if node is None else _settled(node, root, self.sources)
            if node is not None and value is not None:
                self.settled.update((node.name, *(source.name for source in node.all_input_nodes)))
                return value
        return NotImplemented

    def drop_from(self, graph: fx.Graph) -> None:
        """Remove what was computed for the answers alone, random numbers included."""
        drop_unused(graph)
        for node in reversed(graph.nodes):
            if node.name in self.settled and not node.users and node.op == "call_function":
                graph.erase_node(node)


def node_of(tensor: Tensor) -> tuple[fx.Node | None, Any]:
    """Return the node that computes this tensor, and the module that holds the constants."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    if mode is None:
        return None, None
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return (None if slot is None else slot.proxy.node), getattr(mode.tracer, "root", None)


def _settled(node: fx.Node, root: Any, sources: list[Tensor]) -> Any:
    """Return the value of this node if it can never be another one, else None."""
    target: Any = node.target
    if target in _COMPARISONS:
        number, bound = node.args
        if getattr(number, "target", None) in _UNIFORM and isinstance(bound, (int, float)):
            below, above = _COMPARISONS[target]
            # Uniform numbers are at least 0 and less than 1.
            strict = target in (aten.le.Scalar, aten.gt.Scalar)
            if bound < 0 or (bound == 0 and not strict):
                return below
            return above if bound >= 1 else None
    value = computed(node, root, {}, sources)
    with _disable_current_modes():
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else None


def computed(
    node: fx.Node,
    root: Any,
    known: dict[fx.Node, Any],
    sources: list[Tensor],
    *,
    any_size: bool = False,
) -> Any:
    """Compute this node if it depends on constants alone; return None if it does not.

    `root` holds the constants; `known` keeps what has been computed. Constants that are read are
    added to `sources`: the caller watches them. With `any_size` they may be large.
    """
    if node in known:
        return known[node]
    known[node] = None
    target: Any = node.target
    if node.op == "get_attr":
        constant = getattr(root, str(node.target), None)
        fits = any_size or getattr(constant, "numel", int)() <= SMALL
        if isinstance(constant, Tensor) and fits and not constant.is_inference():
            known[node] = constant
            sources.append(constant)
    elif node.op == "call_function" and _is_pure(node):
        inputs = {
            source: computed(source, root, known, sources, any_size=any_size)
            for source in node.all_input_nodes
        }
        if all(value is not None for value in inputs.values()):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
            if not _has_symbols((args, kwargs)):
                with _disable_current_modes(), torch.no_grad():
                    known[node] = target(*args, **kwargs)
    return known[node]


def _is_pure(node: fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return bool(target.__module__ == "_operator")
    return not target._schema.is_mutable and not draws(target, node.args, node.kwargs)


def _has_symbols(arguments: Any) -> bool:
    leaves: list[Any] = []
    fx.node.map_aggregate(arguments, leaves.append)
    return any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in leaves)


def draws(target: Any, args: Any, kwargs: Any) -> bool:
    """True if this operation draws from a random generator."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "philox_seed":  # A backward of attention: it has the forward's seed.
            return False
        if argument.name == "dropout_p":  # Attention draws only with dropout.
            dropout = args[position] if position < len(args) else None
            return bool(kwargs.get("dropout_p", dropout if dropout is not None else 0.0))
    return True
