"""16-bit GELUs with a single exponential, and the bias gradient summed in the same kernel.

Compiled as written, a tanh GELU spends more time on its tanh than on memory. But ½ (1 + tanh u) is
the logistic function of 2u: one exponential and one division, equal up to the last bits of float32.
The gradient of a GELU's input is that of a linear layer's output, and the sum of its rows is the
gradient of that layer's bias: on devices with the kernel, both are computed together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor, fx

from wholebatch.compile.fusion import (
    column_sum_into_buffer,
    computes_rightly,
    once_per_machine,
    operation,
)
from wholebatch.window.precision import SIXTEEN_BIT

aten = torch.ops.aten
LINEAR = 2.0 * sqrt(2.0 / pi)
CUBIC = 0.044715 * LINEAR
"""2u = LINEAR · x + CUBIC · x³."""


@cache
def _operation() -> Any:
    """Return the op `(gradient, x, bias_sum, approximate) -> gradient of x`.

    It adds the sum of the rows of that gradient to `bias_sum`.
    """

    def run(gradient: Tensor, x: Tensor, bias_sum: Tensor, approximate: str) -> Tensor:
        gradient, x = gradient.contiguous(), x.contiguous()
        if not x.is_cuda:
            return _by_operations(gradient, x, bias_sum, approximate)
        from wholebatch.compile.triton_kernels import gelu_backward

        tanh = approximate == "tanh"
        return gelu_backward(gradient, x, bias_sum, is_tanh=tanh, linear=LINEAR, cubic=CUBIC)

    def fake(_: Tensor, x: Tensor, *__: Any) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return operation("gelu_backward_", run, fake, ("bias_sum",))


def _by_operations(gradient: Tensor, x: Tensor, bias_sum: Tensor, approximate: str) -> Tensor:
    """Compute the kernel's result with torch operations: for the CPU, and to check the kernel."""
    made: Tensor = aten.gelu_backward.default(gradient, x, approximate=approximate)
    bias_sum += made.to(bias_sum.dtype).reshape(-1, x.shape[-1]).sum(0)
    return made


@once_per_machine
def can_fuse_gelu(device: torch.device) -> bool:
    """True if this device has the kernel and it computes correctly."""
    return computes_rightly(device, _operation, _agrees)


def _agrees(run: Callable[..., Any], device: torch.device) -> bool:
    numbers = torch.arange(67 * 300, device=device, dtype=torch.float32)
    x, gradient = ((numbers.remainder(by) / by - 0.5).reshape(67, 300) for by in (101, 103))
    for approximate in ("tanh", "none"):
        given = gradient.bfloat16(), (12.0 * x).bfloat16()
        sums = torch.ones(2, 300, device=device)
        found = run(*given, sums[0], approximate)
        wanted = _by_operations(*given, sums[1], approximate)
        pairs = (found.float(), wanted.float()), (sums[0], sums[1])
        if not all(bool((one - two).norm() <= 4e-3 * two.norm()) for one, two in pairs):
            return False
    return True


def fuse_gelu(graph: fx.Graph) -> int:
    """Use the fused op wherever a bias gradient is summed from a GELU's gradient; return how many.

    Gradients must already be added into their buffers. Dead-code elimination removes the replaced
    nodes.
    """
    fused = 0
    for node in list(graph.nodes):
        if node.target is not aten.gelu_backward.default:
            continue
        gradient, x, *_ = node.args
        value = node.meta["val"]
        if value.dtype not in SIXTEEN_BIT or not isinstance(value.shape[-1], int):
            continue
        added = column_sum_into_buffer(node, value.shape[-1])
        if added is None:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(
                _operation(), (gradient, x, added.buffer, node.kwargs.get("approximate", "none"))
            )
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(added.addition)
        fused += 1
    return fused


def simplify_gelu(graph: fx.Graph) -> int:
    """Rewrite every tanh GELU and its gradient with one exponential; return how many."""
    changed = 0
    for node in list(graph.nodes):
        if node.target is aten.gelu.default:
            gradient, source = None, node.args[0]
        elif node.target is aten.gelu_backward.default:
            gradient, source = node.args[:2]
        else:
            continue
        if node.kwargs.get("approximate") != "tanh" or node.meta["val"].dtype not in SIXTEEN_BIT:
            continue
        with graph.inserting_before(node):
            made = _written(graph, source, gradient, node.meta["val"].dtype)
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        changed += 1
    return changed


def _written(graph: fx.Graph, source: Any, gradient: Any, dtype: torch.dtype) -> fx.Node:
    call = graph.call_function
    wide: dict[str, Any] = {"dtype": torch.float32}
    x = call(aten._to_copy.default, (source,), wide)
    squared = call(aten.mul.Tensor, (x, x))
    slope = call(aten.add.Tensor, (call(aten.mul.Tensor, (squared, CUBIC)), LINEAR))
    share = call(aten.sigmoid.default, (call(aten.mul.Tensor, (x, slope)),))
    made = call(aten.mul.Tensor, (x, share))  # The GELU itself: x · s.
    if gradient is not None:  # Its derivative: s + x s (1 - s) (2u)′.
        inner = call(aten.add.Tensor, (call(aten.mul.Tensor, (squared, 3.0 * CUBIC)), LINEAR))
        rest = call(aten.rsub.Scalar, (share, 1.0))
        grown = call(aten.mul.Tensor, (call(aten.mul.Tensor, (made, rest)), inner))
        incoming = call(aten._to_copy.default, (gradient,), wide)
        made = call(aten.mul.Tensor, (incoming, call(aten.add.Tensor, (share, grown))))
    return call(aten._to_copy.default, (made,), {"dtype": dtype})
