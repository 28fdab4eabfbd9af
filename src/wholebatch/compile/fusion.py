"""Tools for traced graphs: recognise nodes and operations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)
_CHEAP = (aten._to_copy.default, aten._unsafe_view.default)
"""Operations without torch's tag for pointwise ones that compute each number from one number."""


def operation(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    writes: tuple[str, ...] = (),
) -> Any:
    """Define an operation of this package; `fake` returns results that are not computed.

    It takes tensors of any strides: Inductor copies none for it.
    """
    any_strides = (torch.Tag.flexible_layout,)
    operation = torch.library.custom_op(
        f"wholebatch::{name}", run, mutates_args=writes, tags=any_strides
    )
    operation.register_fake(fake)
    return getattr(torch.ops.wholebatch, name).default


def cast_to(node: fx.Node) -> torch.dtype | None:
    """Return the target dtype if this node is a cast and nothing else."""
    if node.target is not aten._to_copy.default:
        return None
    dtype = node.kwargs.get("dtype")
    others = {k: v for k, v in node.kwargs.items() if k not in ("dtype", "layout", "device")}
    return dtype if isinstance(dtype, torch.dtype) and not any(others.values()) else None


def same_shape(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """True if the shapes are always equal. It adds no guard on a symbol."""
    return len(sizes) == len(others) and all(
        bool(expression_of(a) == expression_of(b)) for a, b in zip(sizes, others, strict=True)
    )


def expression_of(size: Any) -> Any:
    """Return the expression of a symbolic size, and a number as it is."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size


def fake_like(mode: Any, tensor: Tensor) -> Tensor:
    """Return a fake tensor of this mode with the layout of a tensor."""
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )


def _by_target(about: Callable[[Any], bool]) -> Callable[[fx.Node], bool]:
    """Answer for the operation of a node, and ask torch once for each: to ask is slow."""
    known = cache(about)
    return wraps(about)(lambda node: known(node.target))


@_by_target
def is_view(target: Any) -> bool:
    """True if the result lies in the memory of an argument, and nothing is written."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return target is aten._unsafe_view.default or target.is_view


@_by_target
def is_cheap(target: Any) -> bool:
    """True if a compiler computes it within the kernel that needs it."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or target in _CHEAP or target.is_view


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operations that read its memory, through views."""
    for user in node.users:
        if user.op == "call_function":
            if is_view(user) or user.target is getitem:
                yield from readers_of(user)
            else:
                yield user


@cache
def written_arguments(target: Any) -> list[tuple[int, str]]:
    """Return the place and the name of each argument that this operation writes."""
    schema = getattr(target, "_schema", None)
    arguments = enumerate(() if schema is None else schema.arguments)
    return [(at, a.name) for at, a in arguments if a.alias_info and a.alias_info.is_write]


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes whose memory this operation writes."""
    for place, name in written_arguments(node.target):
        argument = node.args[place] if place < len(node.args) else None
        argument = node.kwargs.get(name, argument)
        nodes: list[fx.Node] = []
        fx.node.map_arg(argument, nodes.append)
        yield from nodes


def drop_unused(graph: fx.Graph) -> None:
    """Remove operations without effects whose results nothing reads; torch's pass is slower."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def base_of(node: fx.Node) -> fx.Node:
    """Return the node in whose memory this result lies."""
    while node.op == "call_function":
        if is_view(node):
            node = node.all_input_nodes[0]
        else:
            written = list(written_by(node))
            if len(written) != 1:
                break
            node = written[0]
    return node


def fixed(part: Any) -> Any:
    """Return a hashable form of arguments that tells 1 from 1.0 and True; a node is its name."""
    if isinstance(part, (list, tuple)):
        return tuple(map(fixed, part))
    if isinstance(part, dict):
        return tuple((name, fixed(value)) for name, value in part.items())
    return repr(part)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector within this context.

    Tracing, compiling and predicting make so many objects, and few cycles, that the collector takes
    a tenth of their time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
