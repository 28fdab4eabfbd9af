"""Activations that are made again in the backward instead of being kept for it.

Between its forward and its backward a micro-step holds what the backward will read. Some of that is
cheap to make again from what is held in any case: an activation function's output from its input,
and a layer norm's output from its input, mean and deviation. Inductor puts both into kernels that
read those inputs anyway, so it costs one more write, and their memory is free in between.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx

__all__ = ["recompute"]

aten = torch.ops.aten

_ACTIVATIONS = (aten.gelu.default, aten.silu.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int)


def recompute(graph: fx.Graph, seeds: Sequence[fx.Node]) -> int:
    """Change the graph so; returns how many tensors are no longer held."""
    backward = _after(graph, seeds)
    changed = 0
    for node in list(graph.nodes):
        if node in backward:
            continue
        if node.target in _ACTIVATIONS:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if _is_read(source, backward) and _make_again(graph, node, backward):
                changed += 1
        elif node.target is aten.native_layer_norm.default:
            changed += _make_norm_again(graph, node, backward)
    return changed


def _after(graph: fx.Graph, seeds: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The nodes that depend on a seed, which is to say the backward, with their places."""
    found: dict[fx.Node, int] = {}
    for place, node in enumerate(graph.nodes):
        if node in seeds or any(source in found for source in node.all_input_nodes):
            found[node] = place
    return found


def _is_read(node: fx.Node, backward: dict[fx.Node, int]) -> bool:
    """Whether the backward reads this tensor, or a view of it."""
    return any(True for _ in _readers(node, backward))


def _readers(
    node: fx.Node, backward: dict[fx.Node, int]
) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Who reads it in the backward, each with the views that lie between."""
    for user in node.users:
        if user in backward:
            yield user, ()
        elif user.target in _VIEWS:
            for reader, views in _readers(user, backward):
                yield reader, (user, *views)


def _make_again(graph: fx.Graph, node: fx.Node, backward: dict[fx.Node, int]) -> bool:
    """Let the backward read a second copy of this node, made just before it is read."""
    readers = sorted(_readers(node, backward), key=lambda found: backward[found[0]])
    if not readers:
        return False
    with graph.inserting_before(readers[0][0]):
        again = graph.node_copy(node)
    _read_instead(graph, node, again, readers)
    return True


def _make_norm_again(graph: fx.Graph, norm: fx.Node, backward: dict[fx.Node, int]) -> int:
    """The same for a layer norm, whose statistics are held for its own backward."""
    parts = {node.args[1]: node for node in norm.users if node.target is operator.getitem}
    source, _, weight, bias, _ = norm.args
    if set(parts) != {0, 1, 2} or not isinstance(source, fx.Node) or weight is None:
        return 0
    held = (source, parts[1], parts[2])
    if not all(_is_read(node, backward) for node in held):
        return 0
    if len(source.meta["val"].shape) < 2 or source.meta["val"].dtype is not torch.float32:
        return 0
    changed = 0
    for cast in list(parts[0].users):
        if cast.target is not aten._to_copy.default or cast in backward:
            continue
        readers = sorted(_readers(cast, backward), key=lambda found: backward[found[0]])
        if not readers:
            continue
        with graph.inserting_before(readers[0][0]):
            centred = graph.call_function(aten.sub.Tensor, (source, parts[1]))
            value = graph.call_function(aten.mul.Tensor, (centred, parts[2]))
            value = graph.call_function(aten.mul.Tensor, (value, weight))
            if bias is not None:
                value = graph.call_function(aten.add.Tensor, (value, bias))
            again = graph.call_function(cast.target, (value,), dict(cast.kwargs))
            again.meta.update(cast.meta)
        _read_instead(graph, cast, again, readers)
        changed += 1
    return changed


def _read_instead(
    graph: fx.Graph,
    node: fx.Node,
    again: fx.Node,
    readers: list[tuple[fx.Node, tuple[fx.Node, ...]]],
) -> None:
    for reader, views in readers:
        old, new = node, again
        for view in views:
            with graph.inserting_before(reader):
                copied = graph.node_copy(view)
            copied.replace_input_with(old, new)
            old, new = view, copied
        reader.replace_input_with(old, new)
