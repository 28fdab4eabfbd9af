"""Several linear layers that read the same input, as one matrix product.

Queries, keys and values are products of one input with three weights, and so are the two halves of
a gated perceptron. As one product with the weights one above the other they fill the device better,
in the forward, for the gradient of the input, and for those of the weights. No weight moves: the
16-bit copies of the weights, and their gradient buffers, lie one behind the other in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx

from wholebatch.compile.fused_weight_grad import add_product
from wholebatch.compile.fusion import VIEWS, cast_to, readers_of, same_shape
from wholebatch.compile.gradient_buffers import ALIGNED

aten = torch.ops.aten
_READS = (*VIEWS, aten.reshape.default)


@dataclass(frozen=True)
class Weight:
    """A trained weight of the graph: its number in memory, its 16-bit copy and its gradient."""

    place: int
    """Weights of consecutive numbers lie one behind the other."""
    cast: fx.Node
    buffer: fx.Node | None


@dataclass
class _Layer:
    """A product of the shared input with one weight, and its backward."""

    weight: Weight
    product: fx.Node
    of_weight: fx.Node | None = None
    """The addition of the weight's gradient."""
    of_output: fx.Node | None = None
    of_input: fx.Node | None = None


class SharedInputs:
    """Joins the products in a graph; `joined` are the inputs that it has added to the graph."""

    def __init__(
        self, graph: fx.Graph, weights: Sequence[Weight], casts: Collection[fx.Node]
    ) -> None:
        self._graph = graph
        self._casts = casts
        self._weights = {weight.cast: weight for weight in weights if _can_adjoin(weight.cast)}
        self.joined: dict[tuple[fx.Node, ...], fx.Node] = {}
        """For each tuple of inputs of the graph, the input that is all of them in one."""

    def join(self) -> int:
        """Join what can be joined; return the number of products saved in the forward."""
        groups = self._groups()
        if not groups:
            return 0
        self._last_input = self._graph.find_nodes(op="placeholder")[-1]
        additions = self._graph.find_nodes(op="call_function", target=add_product())
        self._backward = (*additions, self._graph.output_node())[0]  # Here it begins.
        for layer in (layer for run in groups for layer in run):
            _find_backward(layer)
        for run in groups:
            self._join_forward(run)
            if all(member.of_weight is not None for member in run):
                self._join_backward(run)
        return sum(len(run) - 1 for run in groups)

    def _groups(self) -> list[list[_Layer]]:
        """Return products of one input, written alike, whose weights lie one behind the other."""
        groups: dict[Any, list[_Layer]] = {}
        for node in self._graph.nodes:
            if node.target is aten.mm.default or _adds_a_row(node):
                x, turned = node.args[-2:]
                weight = self._weights.get(_untransposed(turned, odd=True))
                if weight is not None and x not in self._weights:
                    groups.setdefault((node.target, x), []).append(_Layer(weight, node))
        runs = []
        for layers in groups.values():
            layers.sort(key=lambda member: member.weight.place)
            numbered = groupby(enumerate(layers), lambda pair: pair[1].weight.place - pair[0])
            runs += [[layer for _, layer in run] for _, run in numbered]
        return [run for run in runs if len(run) > 1]

    def _all_in_one(self, parts: Sequence[fx.Node]) -> fx.Node:
        """Return the input of the graph that holds the rows of all these inputs."""
        key = tuple(parts)
        if key not in self.joined:
            with self._graph.inserting_after(self._last_input):
                joined = self._graph.placeholder("_and_".join(part.name for part in parts))
            self._last_input = joined
            self.joined[key] = joined
        return self.joined[key]

    def _join_forward(self, run: Sequence[_Layer]) -> None:
        first = run[0].product
        # The backward reads these results of the forward.
        kept = [any(user > self._backward for user in readers_of(layer.product)) for layer in run]
        biases = [layer.product.args[0] for layer in run] if len(first.args) == 3 else []
        with self._graph.inserting_before(min(layer.product for layer in run)):
            weight = self._call(
                aten.t.default, self._all_in_one([layer.weight.cast for layer in run])
            )
            bias = [self._bias(biases)] if biases else []
            product = self._call(first.target, *bias, first.args[-2], weight)
            end = 0
            for layer, is_kept in zip(run, kept, strict=True):
                start, end = end, end + layer.weight.cast.meta["val"].shape[0]
                part = self._call(aten.slice.Tensor, product, 1, start, end)
                if is_kept and not all(kept):  # As a view, it would hold the others' memory too.
                    part = self._call(aten.clone.default, part)
                part.meta.update(layer.product.meta)
                layer.product.replace_all_uses_with(part)
        for layer in run:
            self._graph.erase_node(layer.product)

    def _bias(self, biases: list[Any]) -> fx.Node:
        if all(bias_node in self._casts and _can_adjoin(bias_node) for bias_node in biases):
            return self._all_in_one(biases)
        return self._call(aten.cat.default, biases)

    def _join_backward(self, run: Sequence[_Layer]) -> None:
        """Join the gradients of the weights, and those of the input if only their sum is read."""
        additions = [layer.of_weight for layer in run if layer.of_weight is not None]
        last = max(additions)
        products = [layer.of_input for layer in run if layer.of_input is not None]
        sums = len(products) == len(run) and self._summed(products)
        if sums:
            last = max(last, *products)
        with self._graph.inserting_before(last):
            gradient = self._call(aten.cat.default, [layer.of_output for layer in run], 1)
            turned = self._call(aten.t.default, gradient)
            buffers = [layer.weight.buffer for layer in run if layer.weight.buffer is not None]
            x = additions[0].args[2]
            self._graph.call_function(add_product(), (self._all_in_one(buffers), turned, x))
            if sums:
                weight = self._all_in_one([layer.weight.cast for layer in run])
                product = self._call(aten.mm.default, gradient, weight)
                product.meta.update(max(products).meta)
                max(products).replace_all_uses_with(product)
        for node in additions:
            self._graph.erase_node(node)

    def _summed(self, products: Sequence[fx.Node]) -> bool:
        """Leave only the last of these products in the sum; return False if they are not summed.

        It will be the product of all.
        """
        *others, last = sorted(products)
        addends = [_read_once(product) for product in others]
        if not all(map(_is_summed, (*addends, _read_once(last)))):
            return False
        for addend in addends:
            [user] = addend.users
            [rest] = [source for source in user.all_input_nodes if source is not addend]
            user.replace_all_uses_with(rest)
            self._graph.erase_node(user)
        return True

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self._graph.call_function(target, args)


def _can_adjoin(part: fx.Node) -> bool:
    """True if the next tensor in memory may begin where this input ends."""
    return bool(part.meta["val"].numel() % ALIGNED == 0)


def _adds_a_row(node: fx.Node) -> bool:
    """True if it is a product to which the same bias is added in every row."""
    if node.target is not aten.addmm.default or node.kwargs:
        return False
    return bool(node.all_input_nodes[0].meta["val"].dim() == 1)


def _untransposed(node: Any, *, odd: bool = False) -> Any:
    """Return the matrix of which this is the transpose (`odd`), or that it is itself."""
    while isinstance(node, fx.Node) and node.target is aten.t.default:
        node, odd = node.args[0], not odd
    return None if odd else node


def _find_backward(layer: _Layer) -> None:
    """Find the addition of the weight's gradient, if it is the only one, and the input's."""
    x, buffer = layer.product.args[-2], layer.weight.buffer
    if buffer is None or len(buffer.users) != 1:
        return  # Other additions must not write into joined memory beside this one.
    [addition] = buffer.users
    if addition.target is not add_product() or addition.args[2] is not x:
        return
    gradient = _untransposed(addition.args[1], odd=True)
    if gradient is None:
        return
    layer.of_weight, layer.of_output = addition, gradient
    for user in gradient.users:
        is_product = user.target is aten.mm.default and user.args[0] is gradient
        if is_product and _untransposed(user.args[1]) is layer.weight.cast:
            layer.of_input = user


def _read_once(node: fx.Node) -> fx.Node:
    """Follow a result through views and casts to float32, as long as each has one user."""
    while len(node.users) == 1:
        [user] = node.users
        if user.target not in _READS and cast_to(user) is not torch.float32:
            break
        node = user
    return node


def _is_summed(addend: fx.Node) -> bool:
    """True if the only use of this node is a sum with another one of its shape and dtype."""
    user = next(iter(addend.users)) if len(addend.users) == 1 else None
    if user is None or user.target is not aten.add.Tensor or user.kwargs:
        return False
    values = [node.meta["val"] for node in (user, *user.all_input_nodes)]
    return len(values) == 3 and all(
        value.dtype is values[0].dtype and same_shape(value.shape, values[0].shape)
        for value in values
    )
