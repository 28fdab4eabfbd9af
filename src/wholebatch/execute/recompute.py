"""Activations that are made again in the backward instead of being kept for it.

Between its forward and its backward a micro-step holds what the backward will read. The output of
an activation function is cheap to make again from its input, which is held in any case. Inductor
puts that into the kernel of the function's own backward, which reads the input anyway, so it costs
one more write; for a GPT it saves a sixth of the activations. (Layer norms' outputs would be a
twelfth more, but cost as much time again on an H200: they are held.)
"""

from __future__ import annotations

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
            if any(_readers(source, backward)) and _make_again(graph, node, backward):
                changed += 1
    return changed


def _after(graph: fx.Graph, seeds: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The nodes that depend on a seed, which is to say the backward, with their places."""
    found: dict[fx.Node, int] = {}
    for place, node in enumerate(graph.nodes):
        if node in seeds or any(source in found for source in node.all_input_nodes):
            found[node] = place
    return found


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
