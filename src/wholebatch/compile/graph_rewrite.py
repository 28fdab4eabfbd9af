"""The rewrite of a traced graph for execution: weights cast outside, gradients added in place.

None of these rewrites changes a number beyond the order of additions. Weights that are cast to 16
or 8 bit become inputs, which are cast once per window. Each gradient is added into its buffer as
soon as it is computed; products and rows of embeddings are added by the operation that computes
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from wholebatch.compile import fused_weight_grad as fused
from wholebatch.compile.fusion import (
    base_of,
    cast_to,
    drop_unused,
    fixed,
    is_cheap,
    is_view,
    operation,
    same_shape,
    written_by,
)
from wholebatch.compile.gradient_buffers import Cast
from wholebatch.compile.shared_input import SharedInputs, Weight
from wholebatch.compile.trace import Traced
from wholebatch.window.precision import SIXTEEN_BIT

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_NEAR = 32
"""Operations at most this far apart belong to one layer."""
_CROWDED = 512
"""Indices per row of an embedding from which its gradient is summed in several copies."""
_COPIES = 256


@dataclass(frozen=True)
class Rewritten:
    """The graph: (trained, others, tensors, seeds, casts, buffers, joined) -> (totals, units).

    Open sizes come before these inputs.
    """

    graph: fx.GraphModule
    casts: tuple[Cast, ...]
    """The trained parameter and the format of each cast."""
    read: tuple[int, ...]
    """Which of (casts, buffers) are inputs: not those that only a joined input holds.

    For a compiler, two inputs that share memory would be one, as large as the whole allocation.
    """
    joined: tuple[tuple[int, ...], ...]
    """For each joined input, which of (casts, buffers) it holds, one behind the other."""
    fused: Mapping[str, int]
    """How many were fused, by kind."""


def rewrite(
    traced: Traced,
    trained: int,
    buffer_dtypes: list[torch.dtype],
    *,
    products: bool = False,
    shares: bool = False,
) -> Rewritten:
    """Return the same micro-step with gradients added into buffers instead of returned.

    `buffer_dtypes` are the dtypes of the buffers of `traced.used`, in that order.
    `products`: 16-bit products add themselves into fp32 buffers (CUDA only).
    `shares`: products of one input with several weights become one; it pays with `products`.
    """
    graph = fx.Graph()
    results = _copied_into(graph, traced.graph.graph)
    sizes = 0 if traced.sizes is None else traced.sizes.merge(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"][sizes:]
    kept = len(results) - len(traced.used)
    gradients: list[Any] = results[kept:]

    casts: dict[Cast, fx.Node] = {}
    last = inputs[-1]
    for index, parameter in enumerate(inputs[:trained]):
        for kind, cast in list(_casts_of(parameter)):  # A layer that is used twice is cast twice.
            if (index, kind) not in casts:
                with graph.inserting_after(last):
                    last = graph.placeholder(f"cast_{index}_{str(kind).removeprefix('torch.')}")
                last.meta.update(cast.meta)
                casts[index, kind] = last
            cast.replace_all_uses_with(casts[index, kind])
            graph.erase_node(cast)
    buffers = []
    for index in traced.used:
        with graph.inserting_after(last):
            last = graph.placeholder(f"buffer_{index}")
        buffers.append(last)

    adder = _Adder(graph, products=products)
    for buffer, gradient, dtype in zip(buffers, gradients, buffer_dtypes, strict=True):
        adder.add(buffer, gradient, dtype)
    graph.output(tuple(results[:kept]))
    drop_unused(graph)
    _merge_equal(graph, inputs[:trained])
    _compute_losses_once(graph)
    weights = _weights(casts, inputs[:trained], traced, buffers)
    shared = SharedInputs(graph, weights, casts.values())
    counts = {"shared": shared.join() if shares else 0}
    drop_unused(graph)
    _views_of_any_strides(graph)
    graph.lint()
    tail = {node: place for place, node in enumerate((*casts.values(), *buffers))}
    joined = tuple(tuple(tail[number] for number in parts) for parts in shared.joined)
    read = tuple(place for node, place in tail.items() if node.users)
    for node in tail:
        if not node.users:
            graph.erase_node(node)
    # It keeps the constants that the graph refers to.
    module = fx.GraphModule(traced.graph, graph)
    return Rewritten(module, tuple(casts), read, joined, counts | adder.made)


def _weights(
    casts: dict[Cast, fx.Node],
    trained: Sequence[fx.Node],
    traced: Traced,
    buffers: Sequence[fx.Node],
) -> list[Weight]:
    """Return the weights that autocast casts, numbered as `in_one_piece` puts them into memory."""
    matrices = [i for i, node in enumerate(trained) if node.meta["val"].dim() > 1]
    place = {index: number for number, index in enumerate(matrices)}
    of = dict(zip(traced.used, buffers, strict=True))
    return [
        Weight(place[index], cast, of.get(index))
        for (index, kind), cast in casts.items()
        if isinstance(kind, torch.dtype) and trained[index].meta["val"].dim() == 2
    ]


def _casts_of(parameter: fx.Node) -> Iterator[tuple[torch.dtype, fx.Node]]:
    """Yield the nodes that hold this parameter in another format, and the format of each."""
    for user in parameter.users:
        dtype = cast_to(user)
        if dtype in SIXTEEN_BIT:
            assert dtype is not None
            yield dtype, user


def _copied_into(graph: fx.Graph, source: fx.Graph) -> list[Any]:
    """Copy the nodes of a graph without `detach` and `alias`; return its results.

    Nothing is differentiated when the graph runs. From torch 2.15 on, a trace holds an `alias` of
    each parameter.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op == "output":
            break
        if node.target in (aten.detach.default, aten.alias.default):
            copies[node] = copies[node.args[0]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results = fx.node.map_arg(source.output_node().args[0], copies.__getitem__)
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _views_of_any_strides(graph: fx.Graph) -> None:
    """Turn views into reshapes: torch predicts the strides of some results wrongly.

    (`mse_loss_backward` is one.) A reshape is a view where it can be, and else a copy; so one that
    is written into stays a view.
    """
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        if not any(target for user in node.users for target in written_by(user)):
            node.target = aten.reshape.default


def _merge_equal(graph: fx.Graph, trained: Sequence[fx.Node]) -> None:
    """Let cheap operations that compute the same share one result.

    Autocast casts the same input for each of several linear layers, and every layer makes the same
    attention mask. The compiler would store them all for the backward. Operations that lie far
    apart are merged only if they are views or depend on no trained parameter: checkpointing
    computes activations twice in order not to store them.
    """
    written = {base_of(target) for node in graph.nodes for target in written_by(node)}
    depends = set(trained)
    first: dict[Any, tuple[int, fx.Node]] = {}
    for place, node in enumerate(list(graph.nodes)):
        if not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
        if not _is_pure(node) or base_of(node) in written:
            continue
        if any(base_of(source) in written for source in node.all_input_nodes):
            continue
        key = _key(node)
        before, same = first.get(key, (place, node))
        anywhere = node not in depends or is_view(node)
        if same is not node and (anywhere or place - before <= _NEAR):
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        else:
            first[key] = place, node


def _compute_losses_once(graph: fx.Graph) -> None:
    """Let what only the results of the graph need be computed where the backward computes it again.

    Each slice of a loss is checkpointed: its backward makes the slice's logits again. No gradient
    depends on the loss, so the loss can wait for these logits.
    """
    written = {base_of(target) for node in graph.nodes for target in written_by(node)}
    output = graph.output_node()
    for_results: set[fx.Node] = {output}
    for node in reversed(graph.nodes):
        reads_written = any(base_of(source) in written for source in node.all_input_nodes)
        if _gives_the_same(node) and not reads_written and for_results.issuperset(node.users):
            for_results.add(node)
    again = {
        _key(node): node
        for node in graph.nodes
        if node not in for_results and node.all_input_nodes and _gives_the_same(node)
    }
    products = []
    for node in list(graph.nodes):
        if node in for_results and node is not output:
            same = again.get(_key(node))
            if same is not None:
                products += [same] * (same.target in _PRODUCTS)
                node.replace_all_uses_with(same)
                graph.erase_node(node)
            elif node < (last := max(node.all_input_nodes, default=node)):
                last.append(node)
    _one_after_the_other(graph, sorted(set(products)))


def _one_after_the_other(graph: fx.Graph, products: Sequence[fx.Node]) -> None:
    """Let each of these products wait for the last product that is made of the one before it.

    These are the logits of slices. A compiler would make all of them, and then all gradients.
    """
    for first, following in itertools.pairwise(products):
        made, node = {first}, first.next
        last = None
        while node is not following:
            if not made.isdisjoint(node.all_input_nodes):
                made.add(node)
                last = node if node.target in _PRODUCTS else last
            node = node.next
        if last is not None:
            source: Any = following.args[-2]
            with graph.inserting_before(following):
                waiting = graph.call_function(_after(), (source, last))
            waiting.meta.update(source.meta)
            following.replace_input_with(source, waiting)


@cache
def _after() -> Any:
    """Return the op `(tensor, earlier)`: a copy of the tensor, made once the other one is there."""

    def run(tensor: Tensor, earlier: Tensor) -> Tensor:
        return tensor.clone()

    return operation("after", run, lambda tensor, _: torch.empty_like(tensor))


def _key(node: fx.Node) -> Any:
    return node.target, fixed(node.args), fixed(node.kwargs)


def _gives_the_same(node: fx.Node) -> bool:
    """True if it gives the same results whenever it is computed from the same inputs."""
    target = node.target
    if target is getitem:
        return True
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _is_pure(node: fx.Node) -> bool:
    """True if it is cheap, or makes a constant."""
    return is_cheap(node) if node.all_input_nodes else _gives_the_same(node)


class _Adder:
    """Adds each gradient into its buffer right after it is computed."""

    def __init__(self, graph: fx.Graph, *, products: bool) -> None:
        self._graph = graph
        self._products = products
        self.made = {"products": 0, "embeddings": 0}

    def add(self, buffer: fx.Node, gradient: fx.Node, dtype: torch.dtype) -> None:
        for part, parent in list(_summands(gradient, None, dtype)):
            if not (self._product(buffer, part, parent, dtype) or self._rows(buffer, part, dtype)):
                with self._graph.inserting_after(part):
                    self._graph.call_function(aten.add_.Tensor, (buffer, part))

    def _product(
        self, buffer: fx.Node, part: fx.Node, parent: fx.Node | None, dtype: torch.dtype
    ) -> bool:
        node, transposed = _product_behind(part, parent) if self._products else (None, False)
        if node is None or dtype is not torch.float32:
            return False
        if node.meta["val"].dtype not in SIXTEEN_BIT:
            return False
        left, right = node.args
        with self._graph.inserting_before(node):
            if transposed:  # (A B)ᵀ = Bᵀ Aᵀ
                left, right = (
                    self._graph.call_function(aten.t.default, (right,)),
                    self._graph.call_function(aten.t.default, (left,)),
                )
            self._graph.call_function(fused.add_product(), (buffer, left, right))
        self.made["products"] += 1
        return True

    def _rows(self, buffer: fx.Node, part: fx.Node, dtype: torch.dtype) -> bool:
        if part.target is not aten.embedding_dense_backward.default:
            return False
        rows, indices, _, padding, by_frequency = part.args
        if by_frequency or part.kwargs:
            return False
        assert isinstance(padding, int)
        with self._graph.inserting_before(part):
            if part.meta["val"].dtype is not dtype:  # 16-bit rows add up in fp32.
                rows = self._graph.call_function(aten._to_copy.default, (rows,), {"dtype": dtype})
            if padding >= 0:  # The padding row gets no gradient.
                at_padding = self._graph.call_function(aten.eq.Scalar, (indices, padding))
                there = self._graph.call_function(aten.unsqueeze.default, (at_padding, -1))
                rows = self._graph.call_function(aten.masked_fill.Scalar, (rows, there, 0.0))
            self._scatter(buffer, indices, rows, part.meta["val"], dtype)
        self.made["embeddings"] += 1
        return True

    def _scatter(
        self, buffer: fx.Node, indices: Any, rows: Any, table: Tensor, dtype: torch.dtype
    ) -> None:
        """Add each row of `rows` to the row of `buffer` that its index names.

        Many indices and few rows would wait for each other at every addition, as in the relative
        positions of T5: there they add into several copies of the table, which are summed.
        """
        at, call = indices.meta["val"], self._graph.call_function
        count = at.numel()
        if not isinstance(count, int) or count < _CROWDED * table.shape[0]:
            call(aten.index_put_.default, (buffer, [indices], rows, True))
            return
        place: dict[str, Any] = {"dtype": torch.int64, "device": table.device}
        numbers = call(aten.arange.default, (count,), place)
        copy = call(
            aten.view.default, (call(aten.remainder.Scalar, (numbers, _COPIES)), [*at.shape])
        )
        filled: dict[str, Any] = {"dtype": dtype, "device": table.device}
        copies = call(aten.full.default, ([_COPIES, *table.shape], 0.0), filled)
        sums = call(aten.index_put.default, (copies, [copy, indices], rows, True))
        call(aten.add_.Tensor, (buffer, call(aten.sum.dim_IntList, (sums, [0]))))


def _summands(
    gradient: fx.Node, parent: fx.Node | None, dtype: torch.dtype
) -> Iterator[tuple[fx.Node, fx.Node | None]]:
    """Yield the addends of a sum, each with its only user (a tied weight has several addends)."""
    parts = gradient.args
    if (
        gradient.target is aten.add.Tensor
        and _used_only_by(gradient, parent)
        and not gradient.kwargs
        and len(set(parts)) == 2
        and all(
            isinstance(part, fx.Node)
            and _used_only_by(part, gradient)
            and part.meta["val"].dtype in (dtype, *SIXTEEN_BIT)
            and same_shape(part.meta["val"].shape, gradient.meta["val"].shape)
            for part in parts
        )
    ):
        for part in parts:
            assert isinstance(part, fx.Node)
            yield from _summands(part, gradient, dtype)
    else:
        yield gradient, parent


def _product_behind(part: fx.Node, parent: fx.Node | None) -> tuple[fx.Node | None, bool]:
    """Return the matrix product behind casts and transposes, and True if it is transposed."""
    node, user, transposed = part, parent, False
    while _used_only_by(node, user):
        if node.target is aten.mm.default:
            return node, transposed
        if node.target is aten.t.default:
            transposed = not transposed
        elif cast_to(node) is not torch.float32:
            break
        node, user = node.all_input_nodes[0], node
    return None, False


def _used_only_by(node: fx.Node, user: fx.Node | None) -> bool:
    return all(reader is user for reader in node.users)
