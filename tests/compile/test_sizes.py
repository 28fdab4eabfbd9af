"""Sizes that a graph leaves open: which they are, what they may be, and what is made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.compile.nets import Encoder, loss, texts
from tests.support import distance
from wholebatch.compile.graph_inputs import take_apart
from wholebatch.compile.graph_rewrite import Fusions, rewrite
from wholebatch.compile.symbolic_sizes import Sizes, differing, pattern
from wholebatch.compile.trace import Form, State, Traced, trace
from wholebatch.window.precision import choose


def test_what_is_open_and_what_goes_together() -> None:
    def kind(rows: int, length: int, extra: int = 3) -> Any:
        return take_apart(
            {
                "x": torch.zeros(rows, length),
                "mask": torch.zeros(rows, 1, length, length),
                "z": torch.zeros(extra),
            }
        )

    first, second, third = kind(4, 4), kind(4, 6), kind(2, 6)
    assert pattern(first.key) == pattern(second.key) != pattern(take_apart(torch.ones(1)).key)
    rows, lengths = ((0, 0), (1, 0)), ((0, 1), (1, 2), (1, 3))  # (tensor, dimension)
    assert set(differing(second, [first.key])) == {rows, lengths}
    assert set(differing(third, [second.key])) == {rows}
    assert set(differing(kind(1, 6), [first.key])) == {lengths}
    assert differing(second, [second.key]) == ()
    groups = differing(second, [first.key, third.key])
    assert set(groups) == {rows, lengths}
    sizes = Sizes.of(second, groups)
    assert sizes.admit(kind(7, 11).tensors)
    assert not sizes.admit(kind(7, 11, extra=4).tensors)  # was the same in all
    assert not sizes.admit(kind(1, 11).tensors)
    assert not sizes.admit(kind(7, 0).tensors)
    turned = {"x": torch.zeros(11, 7).t(), "mask": torch.zeros(7, 1, 11, 11), "z": torch.zeros(3)}
    assert not sizes.admit(take_apart(turned).tensors)  # lies otherwise in memory


def traced_of(model: nn.Module, number: int, length: int, *others: int) -> Traced:
    """The graph for texts of this size, or, if others are given, for any number."""
    precision = choose("bf16", "cpu")
    state = State.of(model, list(model.parameters()))
    inputs = take_apart(texts(1, number, length))
    with precision.forward():
        form = Form.of(loss(model, texts(1, number, length)))
    sizes = None
    if others:
        keys = [take_apart(texts(1, other, other)).key for other in others]
        sizes = Sizes.of(inputs, differing(inputs, keys))
    return trace(model, loss, precision, state, inputs, form, sizes)


def results_of(model: nn.Module, graph: Traced, *sizes: int) -> list[Tensor]:
    """Outputs and gradients of the rewritten graph for texts of this size."""
    micro = take_apart(texts(1, *sizes))
    trained = [parameter.detach() for parameter in model.parameters()]
    buffers = [torch.zeros_like(parameter) for parameter in trained]
    options = Fusions(entropy=True)
    rewritten = rewrite(graph, len(trained), [torch.float32] * len(trained), options)
    assert rewritten.fused["losses"] == 1
    casts = [trained[index].to(dtype) for index, dtype in rewritten.casts]
    leading = () if graph.sizes is None else sizes
    arguments = [*leading, *trained, *micro.tensors, torch.tensor(0.5), *casts, *buffers]
    with torch.no_grad():
        return [*rewritten.graph(*arguments), *buffers]


def test_graphs_of_open_sizes_are_rewritten_as_others_are() -> None:
    model = Encoder()
    number = len(list(model.parameters()))
    dtypes = [torch.float32] * number
    own, of_all = traced_of(model, 3, 7), traced_of(model, 6, 16, 4)
    options = Fusions(products=True, entropy=True)
    one, other = (rewrite(graph, number, dtypes, options) for graph in (own, of_all))
    assert replace(other, graph=one.graph) == one  # as much is fused
    assert (other.fused["products"], other.fused["losses"]) == (4, 1)
    nodes = other.graph.graph.nodes
    reads = [node for node in nodes if node.target is torch.ops.aten.sym_size.int]
    assert len(reads) <= 2  # beside the logits; nothing is held only to be measured
    wanted = results_of(model, own, 3, 7)
    assert distance(results_of(model, of_all, 3, 7), wanted) <= 1e-6
