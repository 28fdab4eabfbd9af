"""Attention with a learnt bias: the graph that uses our kernels, run by its stand-in on a CPU."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.support import distance
from wholebatch.compile import biased_attention

aten = torch.ops.aten
SCALE = 0.3


def inputs() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 3, 9, 16), (2, 3, 7, 16), (2, 3, 7, 16), (1, 3, 9, 7), (2, 3, 9, 16)
    q, k, v, bias, gradient = (torch.randn(*s, generator=draw).bfloat16() for s in shapes)
    return [q, k, v, bias.expand(2, -1, -1, -1), gradient]


def traced(dropout: float, *, again: bool = False, bias_learns: bool = True) -> fx.Graph:
    """A forward and its backward as torch traces them; `again` makes the forward twice."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("q", "k", "v", "bias", "gradient")]
    for node, value in zip(nodes, inputs(), strict=True):
        node.meta["val"] = value

    def forward() -> list[fx.Node]:
        made = graph.call_function(
            aten._scaled_dot_product_efficient_attention.default,
            (*nodes[:4], True, dropout),
            {"scale": SCALE},
        )
        return [graph.call_function(operator.getitem, (made, place)) for place in range(4)]

    results = forward()
    if again:
        results = [results[0], *forward()[1:]]
    back = graph.call_function(
        aten._scaled_dot_product_efficient_attention_backward.default,
        (nodes[4], *nodes[:4], *results, dropout, [True, True, True, bias_learns], False),
        {"scale": SCALE},
    )
    grown = [graph.call_function(operator.getitem, (back, place)) for place in range(4)]
    graph.output((results[0], *grown))
    return graph


def fused(graph: fx.Graph) -> int:
    made = biased_attention.fuse_attention(graph)
    graph.eliminate_dead_code()
    graph.lint()
    return made


def exact(kept: Tensor | float) -> list[Tensor]:
    """Attention and its gradients by autograd in float64."""
    *given, gradient = (one.double().requires_grad_() for one in inputs())
    q, k, v, bias = given
    shares = (q @ k.mT * SCALE + bias).softmax(-1) * kept
    out = shares @ v
    return [out.detach(), *torch.autograd.grad(out, given, gradient.detach())]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_the_fused_graph_makes_the_gradients_of_the_formula(dropout: float) -> None:
    graph = traced(dropout)
    assert fused(graph) == 1
    assert not any("efficient_attention" in str(node.target) for node in graph.nodes)
    run: Any = fx.GraphModule(torch.nn.Module(), graph)
    torch.manual_seed(3)
    found = run(*inputs())
    torch.manual_seed(3)
    scores = torch.zeros(2, 3, 9, 7, dtype=torch.float64)
    draw = torch.rand(1) if dropout else None
    kept = biased_attention._kept(scores, draw, dropout)
    if dropout:
        assert 0.2 < float((kept == 0).double().mean()) < 0.6
    for one, two in zip(found, exact(kept), strict=True):
        assert distance([one.double()], [two]) <= 6e-3
    torch.manual_seed(4)
    assert dropout == 0.0 or not torch.equal(run(*inputs())[0], found[0])  # drawn anew


def test_what_is_left_to_torch() -> None:
    assert fused(traced(0.0, bias_learns=False)) == 0  # it has faster kernels for these
    assert fused(traced(0.1, again=True)) == 0  # a second forward must draw the same
    assert biased_attention.fuse_attention(fx.Graph()) == 0


def test_a_cpu_has_no_such_kernel() -> None:
    assert not biased_attention.can_fuse_attention(torch.device("cpu"))
