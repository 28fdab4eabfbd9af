"""The tanh GELU and its gradient with one exponential, for graphs that a compiler fuses.

tanh(u) = 2 σ(2u) − 1, so GELU(x) = x σ(2u) with u = √(2/π) (x + 0.044715 x³). torch computes a
hyperbolic tangent, which is several times as slow as the one exponential of a sigmoid.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from wholebatch.window.precision import SIXTEEN_BIT

aten = torch.ops.aten
_LINEAR = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = _LINEAR * 0.044715


def gelu(source: Tensor) -> Tensor:
    """Return the tanh GELU of 16-bit numbers."""
    x = source.float()
    return (x * torch.sigmoid(x * (_CUBIC * (x * x) + _LINEAR))).to(source.dtype)


def gelu_backward(gradient: Tensor, source: Tensor) -> Tensor:
    """Return its gradient: with s = σ(2u), the derivative is s + x s (1 − s) (2u)′."""
    x = source.float()
    share = torch.sigmoid(x * (_CUBIC * (x * x) + _LINEAR))
    slope = share + x * share * (1.0 - share) * (3.0 * _CUBIC * (x * x) + _LINEAR)
    return (gradient.float() * slope).to(source.dtype)


def simplify_gelu(graph: fx.Graph) -> int:
    """Write every 16-bit tanh GELU, and its gradient, in operations; return how many."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    written: dict[Any, Any] = {
        aten.gelu.default: gelu,
        aten.gelu_backward.default: gelu_backward,
    }
    nodes = [
        node
        for node in graph.nodes
        if node.target in written
        and node.kwargs.get("approximate") == "tanh"
        and node.meta["val"].dtype in SIXTEEN_BIT
    ]
    for node in nodes:
        inputs = list(node.args)
        part = make_fx(written[node.target])(*(source.meta["val"] for source in inputs)).graph
        places = part.find_nodes(op="placeholder")
        with graph.inserting_before(node):
            copied = graph.graph_copy(part, dict(zip(places, inputs, strict=True)))
        node.replace_all_uses_with(copied)
        graph.erase_node(node)
    return len(nodes)
