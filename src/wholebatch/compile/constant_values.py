"""The values of nodes that are computed from constants alone, and the operations that draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

SMALL = 16
"""The size up to which a constant is computed, unless the caller wants any."""


def node_of(tensor: Tensor) -> tuple[fx.Node | None, Any]:
    """Return the node that computes this tensor, and the module that holds the constants."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    if mode is None:
        return None, None
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return (None if slot is None else slot.proxy.node), getattr(mode.tracer, "root", None)


def computed(
    node: fx.Node,
    root: Any,
    known: dict[fx.Node, Any],
    *,
    any_size: bool = False,
) -> Any:
    """Compute this node if it depends on constants alone; return None if it does not.

    `root` holds the constants; `known` keeps what has been computed. With `any_size` they may be
    large.
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
    elif node.op == "call_function" and _is_pure(node):
        inputs = {
            source: computed(source, root, known, any_size=any_size)
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
