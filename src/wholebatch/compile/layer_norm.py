"""The backward of a layer norm and the operations around it, as one operation.

Under autocast, the backward of a residual network computes from the 16-bit gradient of a norm's
output, the norm's input and the residual's gradient: the gradient of the norm's input, its sum with
the residual's gradient, a 16-bit copy of that, and three sums over all rows (the gradients of the
norm's weight and bias, and of the bias of the layer before). Compiled, these are seven kernels. As
one operation, everything is read once. An RMS norm is a layer norm without mean and bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from wholebatch.compile.fusion import (
    PRODUCTS,
    VIEWS,
    Added,
    added_into_buffer,
    cast_to,
    column_sum_into_buffer,
    computes_rightly,
    once_per_machine,
    operation,
    same_shape,
)
from wholebatch.window.precision import SIXTEEN_BIT

aten = torch.ops.aten
_RMS_BACKWARD = getattr(getattr(aten, "_fused_rms_norm_backward", None), "default", None)
"""None before torch 2.9."""
_LONGEST = 8192
"""The longest row that one program can hold."""


class Read(NamedTuple):
    """The inputs of the operation; the norm's input is `x` plus `addend`."""

    gradient: Tensor
    x: Tensor
    addend: Tensor | None
    mean: Tensor | None
    """None for an RMS norm."""
    rstd: Tensor
    weight: Tensor | None
    residual: Tensor | None


@cache
def _operation() -> Any:
    """Return the op `(*Read, low, sums, into) -> (gradient, the same in 16 bit, sums)`.

    The sums over rows, computed where asked for, are those of the weight's gradient, the bias's
    gradient, and the 16-bit gradient. A single one is added to the buffer `into`. Several are not:
    the buffers are views of one allocation, and Inductor copies all of it for an operation that
    mutates two of them.
    """

    def run(
        gradient: Tensor,
        x: Tensor,
        addend: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        residual: Tensor | None,
        low: torch.dtype | None,
        sums: list[bool],
        into: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = gradient, x, addend, mean, rstd, weight, residual
        side_by_side: list[Any] = [None if one is None else one.contiguous() for one in given]
        if x.is_cuda and x.dtype is torch.float32:
            from wholebatch.compile.triton_kernels import layer_norm_backward as kernel
        else:
            kernel = _by_operations
        return _made_by(kernel, Read(*side_by_side), low, sums, into)

    def fake(_gradient: Tensor, x: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
        *_, low, sums, into = more
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return out, _lower(x, low), _sums(x, sums, into)

    return operation("layer_norm_backward", run, fake, ("into",))


def _lower(x: Tensor, low: torch.dtype | None) -> Tensor:
    if low is None:
        return x.new_empty(0)
    return torch.empty_like(x, dtype=low, memory_format=torch.contiguous_format)


def _sums(x: Tensor, sums: list[bool], into: Tensor | None) -> Tensor:
    return x.new_empty(len(sums) if any(sums) and into is None else 0, x.shape[-1])


def _made_by(
    run: Callable[..., Tensor],
    read: Read,
    low: torch.dtype | None,
    sums: list[bool],
    into: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    lower, total = _lower(read.x, low), _sums(read.x, sums, into)
    return run(read, None if low is None else lower, total, sums, into), lower, total


def _by_operations(
    read: Read, low: Tensor | None, total: Tensor, sums: list[bool], into: Tensor | None
) -> Tensor:
    """Compute the kernel's result with torch operations: for the CPU, and to check the kernel."""
    gradient, x, addend, mean, rstd, weight, residual = read
    columns = x.shape[-1]
    if addend is not None:
        x = x + addend
    gradient = gradient.to(x.dtype)
    normal = (x if mean is None else x - mean) * rstd
    scaled = gradient if weight is None else gradient * weight
    out = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
    if mean is not None:
        out = out - scaled.mean(-1, keepdim=True)
    out = out * rstd
    rows = tuple(range(x.dim() - 1))
    of_weight, of_bias = (gradient * normal).sum(rows), gradient.sum(rows)
    if residual is not None:
        out = out + residual
    of_low = None
    if low is not None:
        low.copy_(out)
        of_low = low.to(x.dtype).reshape(-1, columns).sum(0)
    for place, found in enumerate((of_weight, of_bias, of_low)):
        if sums[place] and found is not None:
            if into is None:
                total[place] = found
            else:
                into += found
    return out


@once_per_machine
def can_fuse_norms(device: torch.device) -> bool:
    """True if this device has the kernel and it computes correctly."""
    return computes_rightly(device, _operation, _agrees)


def _agrees(run: Callable[..., Any], device: torch.device) -> bool:
    numbers = torch.arange(67 * 300, device=device, dtype=torch.float32)
    x, gradient, residual = (
        (numbers.remainder(by) / by - 0.5).reshape(67, 300) for by in (101, 103, 107)
    )
    addend = residual.bfloat16()
    var, mean = torch.var_mean(x + addend, 1, correction=0, keepdim=True)
    rstd = (var + 1e-5).rsqrt()
    for center, into in ((mean, None), (None, residual[0])):
        read = Read(gradient.bfloat16(), x, addend, center, rstd, 1.0 + x[0], residual)
        how = torch.bfloat16, [True, into is None, into is None]
        given = [None if into is None else into.clone() for _ in range(2)]
        *found, sums = run(*read, *how, given[0])
        *wanted, exact = _made_by(_by_operations, read, *how, given[1])
        pairs = [*zip(found, wanted, strict=True), *zip(sums, exact, strict=True), tuple(given)]
        if not all(
            one is None or bool((one.float() - two.float()).norm() <= 2e-3 * two.float().norm())
            for one, two in pairs
        ):
            return False
    return True


@dataclass
class _Norm:
    """The nodes of one norm's backward, and the uses of its gradient."""

    gradient: fx.Node
    x: fx.Node
    total: fx.Node
    """The gradient of its input, or that plus the residual's."""
    mean: fx.Node | None
    rstd: fx.Node
    weight: fx.Node | None
    addend: fx.Node | None = None
    """The part of the norm's input besides `x`."""
    residual: fx.Node | None = None
    low: fx.Node | None = None
    sums: dict[int, Added] = field(default_factory=dict)
    """The addition of each sum: of the weight (0), the bias (1), and the layer before (2)."""


def fuse_norms(graph: fx.Graph) -> int:
    """Replace the backward of every norm that allows it with the fused op; return how many.

    Gradients must already be added into their buffers. Dead-code elimination removes the replaced
    nodes.
    """
    nodes = [node for node in graph.nodes if node.target in _MATCHES]
    inputs: dict[fx.Node, tuple[fx.Node, fx.Node | None]] = {}
    for node in reversed(nodes):  # In the order of the forward.
        norm = _matched(node)
        if norm is not None:
            inputs[node] = _parts(norm.x, {x for x, _ in inputs.values()})
    for node in nodes:  # The next norm reads the replacement of this one.
        norm = _matched(node) if node in inputs else None
        if norm is not None:
            norm.x, norm.addend = inputs[node]
            _replace(graph, norm)
    return len(inputs)


def _matched(node: fx.Node) -> _Norm | None:
    """Return the norm whose backward is at `node`, or None if the fused op cannot replace it."""
    norm = _MATCHES[node.target](node)
    if norm is None:
        return None
    value = norm.x.meta["val"]
    if cast_to(norm.gradient) is value.dtype:
        source = norm.gradient.all_input_nodes[0]
        if source.meta["val"].dtype in SIXTEEN_BIT:
            norm.gradient = source
    if norm.residual is None:
        _take_residual(norm, value)
    _take_low(norm, value.shape[-1])
    return norm


def _of_torch(node: fx.Node) -> _Norm | None:
    """Return the parts of the backward of torch's own layer norm or RMS norm."""
    gradient, x, shape, *statistics, weight = node.args[: 5 + (len(node.args) > 6)]
    assert isinstance(gradient, fx.Node)
    assert isinstance(x, fx.Node)
    assert isinstance(shape, (list, tuple))
    outs = {user.args[1]: user for user in node.users if user.target is getitem}
    if not _takes(x, shape) or 0 not in outs or len(outs) != len(node.users):
        return None
    mean, rstd = (None, *statistics)[-2:]
    norm = _Norm(gradient, x, outs[0], mean, rstd, weight)  # type: ignore[arg-type]
    for place in (1, 2):
        if place in outs and outs[place].users:
            added = added_into_buffer(outs[place])
            if added is None:
                return None
            norm.sums[place - 1] = added
    return norm


def _of_operations(cube: fx.Node) -> _Norm | None:
    """Return the parts of the backward of an RMS norm that is written out; `cube` is rstd³.

    With g the gradient times the weight, autograd computes g rstd + 2 x (-½ Σ(g x) rstd³) / columns
    which is rstd (g - n Σ(g n) / columns), n = x rstd, whatever rstd is.
    """
    rstd = cube.all_input_nodes[0]
    slope = _only(cube, aten.mul.Tensor)
    spread = _only(slope, aten.expand.default)
    share = _only(spread, aten.div.Scalar)
    across = _only(share, aten.mul.Tensor)
    if cube.args[1] != 3 or slope is None or share is None or across is None:
        return None
    double = _made(_other(across, share), aten.mul.Scalar, 2.0)
    power = _made(double, aten.pow.Tensor_Scalar, 1.0)
    along = _made(_other(slope, cube), aten.mul.Scalar, -0.5)
    if power is None or along is None or along.target is not aten.sum.dim_IntList:
        return None
    x, product = power, along.all_input_nodes[0]
    columns = x.meta["val"].shape[-1]
    scaled = _other(product, x) if product.target is aten.mul.Tensor else None
    last = along.args[1] in ([-1], [x.meta["val"].dim() - 1])
    if scaled is None or not last or share.args[1] != columns or not _takes(x, [columns]):
        return None
    found = _sum_of_both(_user(scaled, rstd), across)
    if found is None:
        return None
    gradient, weight = _weighted(scaled)
    norm = _Norm(gradient, x, found[0], None, rstd, weight, residual=found[1])
    added = _weight_gradient(gradient, x, rstd)
    if added is not None:
        norm.sums[0] = added
    return norm


_MATCHES: dict[Any, Callable[[fx.Node], _Norm | None]] = {
    aten.native_layer_norm_backward.default: _of_torch,
    _RMS_BACKWARD: _of_torch,
    aten.pow.Tensor_Scalar: _of_operations,
}
NORMS = {aten.native_layer_norm_backward.default, _RMS_BACKWARD, aten.rsqrt.default}
"""A graph without any of these operations has no norm to fuse."""


def _only(node: fx.Node | None, target: Any) -> fx.Node | None:
    """Return the only user of a node, if it is of this kind."""
    users = [] if node is None else list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _made(node: fx.Node | None, target: Any, number: float) -> fx.Node | None:
    """Return the tensor from which `target(tensor, number)` has made this node."""
    if node is None or node.target is not target or node.args[1] != number:
        return None
    return node.all_input_nodes[0]


def _other(node: fx.Node, part: fx.Node) -> fx.Node | None:
    """Return the other tensor of an operation with two."""
    others = [one for one in node.all_input_nodes if one is not part]
    return others[0] if len(others) == 1 and len(node.args) == 2 and not node.kwargs else None


def _user(node: fx.Node, other: fx.Node) -> fx.Node | None:
    """Return the product of these two, if there is one."""
    users = (one for one in node.users if one.target is aten.mul.Tensor)
    return next((one for one in users if _other(one, node) is other), None)


def _sum_of_both(one: fx.Node | None, two: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    """Return the sum of both, and what is added to it in between (the residual's gradient)."""
    first, second = _only(one, aten.add.Tensor), _only(two, aten.add.Tensor)
    if one is None or first is None or second is None:
        return None
    if first is second:
        return first, None
    for inner, part, outer in ((first, one, second), (second, two, first)):
        if _only(inner, aten.add.Tensor) is outer:
            residual, sum_ = _other(inner, part), outer.meta["val"]
            if (
                residual is not None
                and residual.meta["val"].dtype is sum_.dtype
                and same_shape(residual.meta["val"].shape, sum_.shape)
            ):
                return outer, residual
    return None


def _weighted(scaled: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the gradient and the norm's weight that were multiplied, or the gradient alone."""
    if scaled.target is aten.mul.Tensor:
        for weight in scaled.all_input_nodes:
            gradient = _other(scaled, weight)
            if (
                weight.op == "placeholder"
                and weight.meta["val"].dim() == 1
                and gradient is not None
            ):
                return gradient, weight
    return scaled, None


def _weight_gradient(gradient: fx.Node, x: fx.Node, rstd: fx.Node) -> Added | None:
    """Return where the sum of gradient · x · rstd over all rows is added into a buffer."""
    normal = _user(x, rstd)
    sums = None if normal is None else _only(_user(gradient, normal), aten.sum.dim_IntList)
    rows = list(range(x.meta["val"].dim() - 1))
    return None if sums is None or sums.args[1] != rows else added_into_buffer(sums)


def _takes(x: fx.Node, shape: Sequence[Any]) -> bool:
    """True if the kernel takes a norm over the last dimension of this input."""
    value = x.meta["val"]
    [columns, *more] = shape
    return (
        not more
        and isinstance(columns, int)
        and columns <= _LONGEST
        and value.dtype in (torch.float32, torch.float64)
        and value.is_contiguous()
        # The compiler reads a cast in 16 bit; fused, it would have to be written in 32.
        and cast_to(x) is None
    )


def _parts(x: fx.Node, kept: set[fx.Node]) -> tuple[fx.Node, fx.Node | None]:
    """Split a norm's input into two addends, if both are in memory anyway.

    Their sum need not be written then. This fits every second norm of a residual network: a layer's
    output added to another norm's input.
    """
    if x.target is not aten.add.Tensor or x.kwargs:
        return x, None
    for part, addend in (x.args, x.args[::-1]):
        if not isinstance(part, fx.Node) or not isinstance(addend, fx.Node) or part not in kept:
            continue
        source = addend
        while source.target in VIEWS:
            source = source.all_input_nodes[0]
        shape = addend.meta["val"].shape
        if source.target in PRODUCTS and same_shape(shape, x.meta["val"].shape):
            return part, addend
    return x, None


def _take_residual(norm: _Norm, value: Tensor) -> None:
    """Include the addition of the residual's gradient, if nothing else reads the norm's."""
    if len(norm.total.users) != 1:
        return
    [user] = norm.total.users
    others = [part for part in user.all_input_nodes if part is not norm.total]
    if user.target is not aten.add.Tensor or user.kwargs or len(others) != 1:
        return
    other = others[0].meta["val"]
    if other.dtype is value.dtype and same_shape(other.shape, value.shape):
        norm.residual, norm.total = others[0], user


def _take_low(norm: _Norm, columns: int) -> None:
    """Include the 16-bit copy of the gradient, and the sum of its rows."""
    lows = [user for user in norm.total.users if cast_to(user) in SIXTEEN_BIT]
    if len(lows) != 1:
        return
    [norm.low] = lows
    added = column_sum_into_buffer(norm.low, columns)
    if added is not None:
        norm.sums[2] = added


def _replace(graph: fx.Graph, norm: _Norm) -> None:
    low = None if norm.low is None else norm.low.meta["val"].dtype
    sums = [place in norm.sums for place in range(3)]
    [into] = [one.buffer for one in norm.sums.values()] if len(norm.sums) == 1 else [None]
    call = graph.call_function
    statistics = norm.mean, norm.rstd, norm.weight
    with graph.inserting_before(norm.total):  # All inputs exist here.
        read = norm.gradient, norm.x, norm.addend, *statistics, norm.residual
        made = call(_operation(), (*read, low, sums, into))
        total = call(getitem, (made, 0))
        total.meta.update(norm.total.meta)
        norm.total.replace_all_uses_with(total)
        if norm.low is not None:
            lower = call(getitem, (made, 1))
            lower.meta.update(norm.low.meta)
            norm.low.replace_all_uses_with(lower)
        added = call(getitem, (made, 2)) if len(norm.sums) > 1 else None
        for place, one in norm.sums.items():
            if added is not None:
                row = call(aten.select.int, (added, 0, place))
                call(aten.add_.Tensor, (one.buffer, row))
            graph.erase_node(one.addition)
