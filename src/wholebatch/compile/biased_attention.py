"""Attention with a learnt bias, such as T5's relative positions, in kernels of our own.

Torch's only fused kernel that has a gradient for the bias was written for older devices, and takes
four times as long on an H200. The kernels here compute the same function. The gradient of
the bias is that of the scores: it is written once, and the gradient of the queries is a matrix
product of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from wholebatch.compile.fusion import computes_rightly, once_per_machine, operation
from wholebatch.window.precision import SIXTEEN_BIT

aten = torch.ops.aten
_HEADS = (16, 32, 64, 128)
"""Head sizes that the kernels have."""
_BITS = 1 << 32


@cache
def _forward_operation() -> Any:
    """Return the op `(q, k, v, bias, draw, dropout, scale) -> (output, log-sum-exp)`.

    `draw` is one random number in [0, 1), the seed of the dropout.
    """

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        draw: Tensor | None,
        dropout: float,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        if not q.is_cuda:
            return _forward_by_operations(q, k, v, bias, draw, dropout, scale)
        from wholebatch.compile.triton_kernels import biased_attention

        out, normaliser = allocated(q, k, v)
        biased_attention(q, k, v, bias, draw, out, normaliser, dropout=dropout, scale=scale)
        return out, normaliser

    def allocated(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
        return _like(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)

    return operation("biased_attention", run, allocated)


@cache
def _backward_operation() -> Any:
    """Return the op `(gradient, q, k, v, bias, output, log-sum-exp, draw, …)`.

    It returns the gradients of q, k, v and of the bias.
    """

    def run(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor,
        normaliser: Tensor, draw: Tensor | None, dropout: float, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        given = gradient, q, k, v, bias, out, normaliser, draw
        if not q.is_cuda:
            return _backward_by_operations(*given, dropout, scale)
        from wholebatch.compile.triton_kernels import biased_attention_backward

        dq, dk, dv, scores = allocated(*given)
        biased_attention_backward(*given, dk, dv, scores, dropout=dropout, scale=scale)
        nothing = q.new_empty(())
        made = torch.baddbmm(nothing, scores.flatten(0, 1), k.flatten(0, 1), beta=0, alpha=scale)
        dq.copy_(made.view(q.shape))
        return dq, dk, dv, scores

    def allocated(
        _: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _like(q), _like(k), _like(v), bias.new_empty(bias.shape)

    return operation("biased_attention_backward", run, allocated)


def _like(heads: Tensor, width: int | None = None) -> Tensor:
    """Return an empty tensor of this shape, laid out as torch's kernels do: heads after rows."""
    batch, number, rows, size = heads.shape
    return heads.new_empty(batch, rows, number, size if width is None else width).transpose(1, 2)


# ------------------------------------------------- the same by torch operations


def _kept(like: Tensor, draw: Tensor | None, dropout: float) -> Tensor:
    """Return 1 / (1 - dropout) where a score is kept and 0 where not; the kernels draw the same."""
    if draw is None:
        return torch.ones_like(like)
    number = torch.arange(like.numel(), device=like.device).reshape(like.shape)
    hashed = _hash(number + _hash((draw * 2.0**24).long()))
    return (hashed >> 1 >= int(dropout * 2**31)).to(like.dtype) / (1.0 - dropout)


def _hash(number: Tensor) -> Tensor:
    """Mix the lower 32 bits of each number (two multiplications with shifts between)."""
    number = number % _BITS
    number = number ^ (number >> 16)
    number = number * 0x7FEB352D % _BITS
    number = number ^ (number >> 15)
    number = number * (0x846CA68B - _BITS) % _BITS  # The product must fit into 64 bits.
    return number ^ (number >> 16)


def _scores(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> Tensor:
    return q.float() @ k.float().transpose(-1, -2) * scale + bias.float()


def _forward_by_operations(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, draw: Tensor | None, dropout: float, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias, scale)
    normaliser = scores.logsumexp(-1)
    shares = (scores - normaliser.unsqueeze(-1)).exp() * _kept(scores, draw, dropout)
    out = _like(q, v.shape[-1])
    out.copy_(shares @ v.float())
    return out, normaliser


def _backward_by_operations(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor,
    normaliser: Tensor, draw: Tensor | None, dropout: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scores = _scores(q, k, bias, scale)
    shares, kept = (scores - normaliser.unsqueeze(-1)).exp(), _kept(scores, draw, dropout)
    upstream = gradient.float()
    of_shares = upstream @ v.float().transpose(-1, -2) * kept
    along = (upstream * out.float()).sum(-1, keepdim=True)
    of_scores = (shares * (of_shares - along)).to(bias.dtype)
    found = (
        of_scores.float() @ k.float() * scale,
        of_scores.float().transpose(-1, -2) @ q.float() * scale,
        (shares * kept).transpose(-1, -2) @ upstream,
    )
    dq, dk, dv = (_like(one).copy_(made) for one, made in zip((q, k, v), found, strict=True))
    return dq, dk, dv, of_scores


# --------------------------------------------------------------------- checks


@once_per_machine
def can_fuse_attention(device: torch.device) -> bool:
    """True if this device has the kernels and they compute correctly."""
    return computes_rightly(device, _operation, _agrees)


def _operation() -> Callable[..., Any]:
    forward, backward = _forward_operation(), _backward_operation()

    def run(gradient: Tensor, *given: Any) -> Any:
        out, normaliser = forward(*given)
        q, k, v, bias, draw, *rest = given
        return out, *backward(gradient, q, k, v, bias, out, normaliser, draw, *rest)

    return run


def _agrees(run: Callable[..., Any], device: torch.device) -> bool:
    """Compare on rows that fill no whole block, with and without dropout."""

    def numbers(*shape: int, by: int) -> Tensor:
        flat = torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.float32)
        return ((flat * 7.0).remainder(by) / by - 0.5).reshape(shape)

    for size, draw, dropout in ((64, None, 0.0), (32, torch.full((1,), 0.37, device=device), 0.3)):
        q, k = numbers(2, 3, 83, size, by=101) * 2, numbers(2, 3, 67, size, by=103) * 2
        v, upstream = numbers(2, 3, 67, size, by=107), numbers(2, 3, 83, size, by=109)
        bias = (numbers(1, 3, 83, 67, by=113) * 4).bfloat16().expand(2, -1, -1, -1)
        given: Any = (*(one.bfloat16() for one in (q, k, v)), bias, draw, dropout, 0.2)
        found = run(upstream.bfloat16(), *given)
        out, normaliser = _forward_by_operations(*given)
        back = (upstream.bfloat16(), *given[:4], out, normaliser, draw, dropout, 0.2)
        wanted = (out, *_backward_by_operations(*back))
        for one, two in zip(found, wanted, strict=True):
            if not bool((one.float() - two.float()).norm() <= 1e-2 * two.float().norm()):
                return False
    return True


# -------------------------------------------------------------------- rewrite


def fuse_attention(graph: fx.Graph) -> int:
    """Replace torch's attention with a bias that has a gradient; return how many.

    If a forward with dropout is computed again for the backward, as by checkpointing, both must
    draw the same: then all stay as they are.
    """
    forwards = [
        node
        for node in graph.nodes
        if node.target is aten._scaled_dot_product_efficient_attention.default
    ]
    pairs = [(node, _backward_of(node)) for node in forwards]
    if not pairs or any(back is None and _options(node)[0] for node, back in pairs):
        return 0
    return sum(_replace(graph, node, back) for node, back in pairs if back is not None)


def _options(forward: fx.Node) -> tuple[float, bool, float]:
    """Return dropout, is_causal and scale of torch's operation."""
    rest = (*forward.args[5:], *(0.0, False)[len(forward.args) - 5 :])
    scale = forward.kwargs.get("scale")
    size = forward.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    return rest[0], rest[1], size**-0.5 if scale is None else scale  # type: ignore[return-value]


def _results(node: fx.Node) -> dict[int, fx.Node] | None:
    """Return the results of an operation by their place, or None if it is used as a tuple."""
    if any(user.target is not operator.getitem for user in node.users):
        return None
    return {user.args[1]: user for user in node.users}  # type: ignore[misc]


def _backward_of(forward: fx.Node) -> fx.Node | None:
    """Return the one backward of this attention, if it needs the gradient of its bias."""
    results = _results(forward) or {}
    if 0 not in results or 1 not in results:
        return None
    users = {user for place, one in results.items() if place for user in one.users}
    if len(users) != 1:
        return None
    (node,) = users
    wanted = aten._scaled_dot_product_efficient_attention_backward.default
    return node if node.target is wanted and node.args[10][3] else None  # type: ignore[index]


def _replace(graph: fx.Graph, forward: fx.Node, backward: fx.Node) -> bool:
    dropout, is_causal, scale = _options(forward)
    q, k, v, bias = forward.args[:4]
    values = [one.meta["val"] for one in (q, k, v, bias)]  # type: ignore[union-attr]
    sizes = {one.shape[-1] for one in values[:3]}
    if (
        is_causal
        or any(one.dtype not in SIXTEEN_BIT for one in values)
        or len(sizes) != 1
        or sizes.pop() not in _HEADS
        or not all(isinstance(size, int) for one in values for size in one.shape)
    ):
        return False
    with graph.inserting_before(forward):
        draw = None
        if dropout:
            on_device: dict[str, Any] = {"device": values[0].device}
            draw = graph.call_function(aten.rand.default, ([1],), on_device)
        made = graph.call_function(_forward_operation(), (q, k, v, bias, draw, dropout, scale))
    results = _results(forward) or {}
    out, normaliser = results[0], results[1]
    out.args, normaliser.args = (made, 0), (made, 1)
    normaliser.meta.pop("val", None)  # Torch's own is padded.
    given = (backward.args[0], q, k, v, bias, out, normaliser, draw, dropout, scale)
    with graph.inserting_before(backward):
        back = graph.call_function(_backward_operation(), given)
    for place, one in (_results(backward) or {}).items():
        one.args = (back, place)
    for node in (backward, *(one for place, one in results.items() if place > 1), forward):
        graph.erase_node(node)
    return True
