"""GELUs by one exponential."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import wholebatch as wb
from tests.compile.nets import Blocks, loss, run_rewritten
from tests.support import distance
from wholebatch.compile.gelu import simplify_gelu
from wholebatch.compile.graph_rewrite import Fusions, Rewritten
from wholebatch.window.precision import choose


def _run(
    model: nn.Module, precision: str, options: Fusions, function: Callable[[Any, Any], wb.Loss]
) -> tuple[Rewritten, list[Tensor], set[str]]:
    """The rewritten graph, what it adds to the buffers, and what it calls."""
    chosen = choose(precision, "cpu")
    rewritten, _, added = run_rewritten(model, function, chosen, options, held=1.0)
    return rewritten, added, {str(node.target) for node in rewritten.graph.graph.nodes}


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_a_gelu_by_one_exponential_is_no_further_from_float64(approximate: str) -> None:
    model = Blocks(approximate=approximate)
    _, exact, _ = _run(Blocks(approximate=approximate).double(), "full", Fusions(), loss)
    _, plain, _ = _run(model, "bf16", Fusions(), loss)
    _, found, called = _run(model, "bf16", Fusions(gelu=True), loss)
    assert any("gelu" in target for target in called) == (approximate == "none")
    assert distance(found, exact) <= 1.1 * distance(plain, exact)
    assert distance(found, plain) <= 2e-3


def test_gelus_in_full_precision_are_left_to_the_compiler() -> None:
    _, plain, _ = _run(Blocks(), "full", Fusions(), loss)
    _, found, called = _run(Blocks(), "full", Fusions(gelu=True), loss)
    assert any("gelu" in target for target in called)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("gradient", [False, True])
def test_gelus_of_all_numbers_of_16_bit(gradient: bool) -> None:
    """Each is within one rounding of torch's own result in float64."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.abs() <= 1e18]  # beyond, torch's own gradient is not a number
    graph = fx.Graph()
    x = graph.placeholder("x")
    if gradient:
        ones = graph.call_function(torch.ops.aten.ones_like.default, (x,))
        ones.meta["val"] = torch.ones_like(numbers)
        node = graph.call_function(
            torch.ops.aten.gelu_backward.default, (ones, x), {"approximate": "tanh"}
        )
    else:
        node = graph.call_function(torch.ops.aten.gelu.default, (x,), {"approximate": "tanh"})
    x.meta["val"] = node.meta["val"] = numbers
    graph.output(node)
    assert simplify_gelu(graph) == 1
    found = fx.GraphModule({}, graph)(numbers)
    exact = numbers.double().requires_grad_()
    made = functional.gelu(exact, approximate="tanh")
    if gradient:
        [made] = torch.autograd.grad(made.sum(), exact)
    made = made.detach()
    rounding = made.abs() * 2.0**-8 + 1e-6
    assert bool(((found.double() - made).abs() <= rounding).all())
