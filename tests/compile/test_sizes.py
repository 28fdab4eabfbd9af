"""Sizes that a graph leaves open: which they are, what they may be, and what is made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import Encoder, loss, texts, trace_of
from tests.support import distance
from wholebatch.compile.graph_inputs import take_apart
from wholebatch.compile.graph_rewrite import rewrite
from wholebatch.compile.symbolic_sizes import differing, pattern
from wholebatch.compile.trace import Traced
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

    model = nn.Linear(6, 6)
    precision = choose("full", "cpu")

    def energy(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
        per_row = model(micro["x"])[:, None] * micro["mask"].mean((1, 2))
        return wb.Loss((per_row.sum() + micro["z"].sum()), micro["x"].shape[0])

    sizes = trace_of(model, energy, second.micro, precision, first.key, third.key).sizes
    assert sizes is not None
    assert sizes.admit(kind(7, 6))
    assert not sizes.admit(kind(1, 6))


def traced_of(model: nn.Module, number: int, length: int, *others: int) -> Traced:
    """The graph for texts of this size, or, if others are given, for any number."""
    keys = [take_apart(texts(1, other, other)).key for other in others]
    return trace_of(model, loss, texts(1, number, length), choose("bf16", "cpu"), *keys)


def results_of(model: nn.Module, graph: Traced, *sizes: int) -> list[Tensor]:
    """Outputs and gradients of the rewritten graph for texts of this size."""
    micro = take_apart(texts(1, *sizes))
    trained = [parameter.detach() for parameter in model.parameters()]
    buffers = [torch.zeros_like(parameter) for parameter in trained]
    rewritten = rewrite(graph, len(trained), [torch.float32] * len(trained))
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
    one, other = (rewrite(graph, number, dtypes, products=True) for graph in (own, of_all))
    assert replace(other, graph=one.graph) == one  # as much is fused
    assert other.fused["products"] == 4
    nodes = other.graph.graph.nodes
    reads = [node for node in nodes if node.target is torch.ops.aten.sym_size.int]
    assert len(reads) <= 2  # beside the logits; nothing is held only to be measured
    wanted = results_of(model, own, 3, 7)
    assert distance(results_of(model, of_all, 3, 7), wanted) <= 1e-6
