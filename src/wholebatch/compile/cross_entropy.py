"""Cross-entropy and its gradient as one operation, in the memory of the logits.

The graph of a micro-step contains both: the log-softmax and the loss in its forward, and the
gradient of the logits in its backward. Only the seed lies between them, and it is known from the
start. As one operation, a row of logits is read once and overwritten by its gradient. A second
tensor of that size, often the largest of all, is never allocated.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx

from wholebatch.compile.fusion import (
    ANY_STRIDES,
    PRODUCTS,
    VIEWS,
    base_of,
    is_view,
    operation,
    same_shape,
)

aten = torch.ops.aten
_SUM, _MEAN = 2, 1
_VIEWS = (*VIEWS, aten.t.default)
_FOLLOWERS = (
    *_VIEWS,
    aten._to_copy.default,
    aten.mm.default,
    aten.sum.dim_IntList,
    aten.addmm_.default,
    aten.add_.Tensor,
)
"""Operations on the gradient of logits that come with it: the gradients of the last layer."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _operation() -> Any:
    """Return the op `(logits, labels, seed, ignored) -> losses of the rows`.

    It overwrites the logits with their gradient.
    """

    def run(logits: Tensor, labels: Tensor, seed: Tensor, ignored: int) -> Tensor:
        if not logits.is_cuda:
            return reference(logits, labels, seed, ignored)
        from wholebatch.compile.triton_kernels import cross_entropy

        return cross_entropy(logits, labels, seed, ignored)

    def fake(logits: Tensor, *_: Any) -> Tensor:
        return logits.new_empty(logits.shape[0], dtype=torch.float32)

    return operation("cross_entropy_", run, fake, ("logits",), **ANY_STRIDES)


def reference(logits: Tensor, labels: Tensor, seed: Tensor, ignored: int) -> Tensor:
    """Compute the kernel's result with torch operations, for the CPU and for tests."""
    counted = labels != ignored
    places = labels.where(counted, 0)[:, None]
    shares = logits.float().log_softmax(1)
    losses = (-shares.gather(1, places)[:, 0]).where(counted, 0.0)
    gradient = shares.exp_()
    gradient.scatter_add_(1, places, gradient.new_full((), -1.0).expand_as(places))
    logits.copy_(gradient * seed.float() * counted[:, None])
    return losses


@cache
def can_fuse_entropy(device: torch.device) -> bool:
    """True if this device has the kernel: a CUDA device, where Triton is installed."""
    return device.type == "cuda" and find_spec("triton") is not None


@dataclass(frozen=True)
class _Loss:
    """The nodes of one cross-entropy and its gradient."""

    loss: fx.Node
    logits: fx.Node
    """The logits as produced: in 16 bit if a cast to fp32 follows."""
    labels: fx.Node
    seed: fx.Node
    gradient: fx.Node
    """The gradient of `logits`, in their dtype."""
    reduction: int
    ignored: int


def fuse_entropy(graph: fx.Graph, results: list[Any]) -> int:
    """Replace every cross-entropy that allows it with the fused op; return how many.

    `results`, the nodes that the graph will return, are updated too. Dead-code elimination removes
    the replaced nodes.
    """
    fused = 0
    for node in list(graph.nodes):
        if node.target is aten.nll_loss_forward.default:
            loss = _matched(node)
            if loss is not None and _bring_forward(graph, loss.seed, node):
                _replace(graph, loss, results)
                fused += 1
    return fused


def _bring_forward(graph: fx.Graph, seed: fx.Node, loss: fx.Node) -> bool:
    """Move the inputs of the seed before the loss; return False if the seed depends on the loss."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    late, open_ = set[fx.Node](), [seed]
    while open_:
        node = open_.pop()
        if places[node] >= places[loss] and node not in late:
            late.add(node)
            open_ += node.all_input_nodes
    if loss in late:
        return False
    for node in sorted(late, key=places.__getitem__):
        loss.prepend(node)
    return True


def _matched(loss: fx.Node) -> _Loss | None:
    """Return the parts of this cross-entropy, or None if the fused op cannot replace it.

    It can if the loss is the sum or mean, without class weights, over log-softmax rows of a matrix,
    and if nothing but its own backward reads what lies between.
    """
    shares, labels, weight, reduction, ignored = loss.args
    assert isinstance(shares, fx.Node)
    assert isinstance(labels, fx.Node)
    is_plain = weight is None and reduction in (_SUM, _MEAN) and not loss.meta["val"][0].dim()
    if not is_plain or shares.target is not aten._log_softmax.default:
        return None
    of_loss = _only(shares.users, aten.nll_loss_backward.default)
    of_shares = _only(shares.users, aten._log_softmax_backward_data.default)
    if of_loss is None or of_shares is None or set(shares.users) != {loss, of_loss, of_shares}:
        return None
    weights = [user for user in loss.users if user.args[1:] == (1,)]
    seed, *rest = of_loss.args
    if (
        shares.args[1:] != (1, False)
        or rest[:5] != [shares, labels, None, reduction, ignored]
        or list(of_loss.users) != [of_shares]
        or of_shares.args[:3] != (of_loss, shares, 1)
        or not all(list(weight.users) == [of_loss] for weight in weights)
        or not isinstance(seed, fx.Node)
    ):
        return None
    logits = _source(shares, loss)
    gradient = None if logits is None else _end(of_shares, logits.meta["val"])
    if logits is None or gradient is None:
        return None
    assert isinstance(reduction, int)
    assert isinstance(ignored, int)
    return _Loss(loss, logits, labels, seed, gradient, reduction, ignored)


def _only(users: Any, target: Any) -> fx.Node | None:
    matching = [user for user in users if user.target is target]
    return matching[0] if len(matching) == 1 else None


def _source(shares: fx.Node, loss: fx.Node) -> fx.Node | None:
    """Return the logits before views and a cast, if nothing uses their memory after the loss."""
    before = set(itertools.takewhile(lambda node: node is not loss, loss.graph.nodes))
    logits = node = shares.all_input_nodes[0]
    user, is_cast = shares, False
    while _all_before(before, [other for other in node.users if other is not user]):
        casts = node.target is aten._to_copy.default and not is_cast
        if not casts and node.target not in VIEWS:
            value = logits.meta["val"]
            fits = value.dtype in _DTYPES and value.is_contiguous() and type(value.shape[-1]) is int
            return logits if fits and node.target in PRODUCTS else None
        source = node.all_input_nodes[0]
        if casts:
            if node.meta["val"].dtype is not torch.float32:
                return None
            logits, is_cast = source, True
        node, user = source, node
    return None


def _all_before(before: Container[fx.Node], users: list[fx.Node]) -> bool:
    """True if these users come before the loss, and so do all that read views which they make."""
    while users:
        user = users.pop()
        if is_view(user):
            users += user.users
        elif user not in before:
            return False
    return True


def _end(node: fx.Node, like: Tensor) -> fx.Node | None:
    """Return the gradient of the logits after views and a cast."""
    while True:
        value = node.meta["val"]
        if value.dtype is like.dtype and same_shape(value.shape, like.shape):
            return node
        if len(node.users) != 1:
            return None
        [user] = node.users
        if user.target not in (*VIEWS, aten._to_copy.default):
            return None
        node = user


def _replace(graph: fx.Graph, loss: _Loss, results: list[Any]) -> None:
    value = loss.logits.meta["val"]
    classes = value.shape[-1]
    call = graph.call_function
    with graph.inserting_before(loss.loss):
        # Inductor takes an operation that writes into a view of another shape for one on the memory
        # behind it, and reads the wrong numbers if it has padded the rows of the product.
        flat = base_of(loss.logits)
        if flat.meta["val"].dim() != 2:
            flat = call(aten.view.default, (loss.logits, [-1, classes]))
        seed, count = loss.seed, None
        if loss.reduction == _MEAN:
            counted = call(aten.ne.Scalar, (loss.labels, loss.ignored))
            count = call(aten.sum.default, (counted,))
            seed = call(aten.div.Tensor, (seed, count))
        rows = call(_operation(), (flat, loss.labels, seed, loss.ignored))
        total = call(aten.sum.default, (rows,))
        if count is not None:
            total = call(aten.div.Tensor, (total, count))
        total.meta["val"] = loss.loss.meta["val"][0]
        shape = [
            size if isinstance(size, int) else _size(graph, loss.logits, dim)
            for dim, size in enumerate(value.shape)
        ]
        gradient = call(aten.view.default, (flat, shape))
        gradient.meta["val"] = loss.gradient.meta["val"]
    for user in list(loss.loss.users):
        if user.args[1:] == (0,):
            user.replace_all_uses_with(total)
            results[:] = [total if result is user else result for result in results]
    loss.gradient.replace_all_uses_with(gradient)


def bring_products_forward(graph: fx.Graph, additions: Sequence[Any]) -> None:
    """Move what only the gradient of a loss's logits waits for up to that loss.

    A loss in slices has several. With its products at its side, the logits of a slice are freed
    before those of the next one are made.
    """
    for loss in graph.find_nodes(op="call_function", target=_operation()):
        known, nodes = set[fx.Node](), iter(graph.nodes)
        for node in nodes:
            known.add(node)
            if node is loss:
                break
        from_loss = {loss.args[0]}
        last = loss
        for node in list(nodes):
            if from_loss.isdisjoint(node.all_input_nodes):
                continue
            if node.target not in (*additions, *_FOLLOWERS):
                continue
            # A view of a weight may come late.
            late = [source for source in node.all_input_nodes if source not in known]
            views = (source.target in _VIEWS for source in late)
            if all(views) and all(known.issuperset(source.all_input_nodes) for source in late):
                for moved in (*late, node):
                    last.append(moved)
                    last = moved
                    known.add(moved)
                from_loss.add(node)


def _size(graph: fx.Graph, node: fx.Node, dim: int) -> fx.Node:
    """Return a symbolic size as a node of the graph."""
    size = graph.call_function(aten.sym_size.int, (node, dim))
    size.meta["val"] = node.meta["val"].shape[dim]
    return size
