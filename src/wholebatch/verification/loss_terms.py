"""Read the terms of a loss from its graph: means or sums, over how many, times which factors.

    (F.cross_entropy(out, y) * 0.5 / 4).backward()     one mean over len(y), times 0.5, over 4

Only plain graphs are read: torch's own losses, means, sums, masks, and the numbers that multiply or
divide them. Everything else is a term of kind "unknown", and its loop is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_MOST_NODES = 512
_MOST_LOSS_NODES = 1 << 13
_CLOSE = 4e-3
"""One step of bfloat16: a factor may have been rounded to it."""

# Nodes that pass one number on, times 1 or -1.
_SAME = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("ToCopy", "Neg", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias"),
        *("Clone", "NanToNum", "Rsub", "Permute", "T"),
    )
    for number in range(4)
) | {"AddBackward1", "SubBackward1"}  # plus a Python number
_ADD = ("AddBackward0", "SubBackward0")
_SUM = ("SumBackward0", "SumBackward1")
_MEAN = ("MeanBackward0", "MeanBackward1")
_PICK = ("Max", "Min", "Amax", "Amin", "Median", "Nanmedian", "Kthvalue", "Topk", "Sort")
_STACK = ("StackBackward0", "CatBackward0")
DDP_SINK = "_DDPSinkBackward"
"""The node through which DistributedDataParallel returns the outputs of its model."""
_PER_ROW = ("NllLoss", "MultiMargin", "MultilabelMargin")
_COMPARE = ("Cdist", "EuclideanDist", "Roll", "Flip")
"""Operations that bring samples together."""
_BY_ELEMENT = ("Add", "Sub", "Mul", "Div", "Expand", "Maximum", "Minimum", "Where", "Repeat")
_ALONG = (
    *("Softmax", "LogSoftmax", "Logsumexp", "Cumsum", "Mean", "Sum", "Var", "Std", "VarMean"),
    *("StdMean", "Norm", "LinalgVectorNorm"),
)
"""Operations along some dimensions: along the first one they make a statistic of the batch."""
_VIEWS = _SAME | {"SliceBackward0", "SelectBackward0"}
_OF_PARAMETERS = {
    *("Pow", "Abs", "Exp", "Log", "Neg", "Mul", "Div", "Add", "Sub", "Rsub", "Sum", "Mean", "Sqrt"),
    *("Select", "Slice", "Unsqueeze", "Squeeze", "View", "LinalgVectorNorm", "Norm", "Clamp", "T"),
    *("Softplus", "Sigmoid", "Tanh", "Reciprocal", "Permute", "Clone", "ToCopy", "Stack", "Cat"),
}


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of a loss: a reduction, and the numbers that multiply and divide it.

    `kind` is "mean", "sum", "zero" (times 0), "penalty" (of parameters alone), "curved" (a function
    of a whole mean, such as its root), "picked" (the largest of a batch) or "unknown".
    """

    node: str
    kind: str
    count: float
    """Elements that the mean, or the sum, is over; ignored labels and masked ones do not count."""
    times: tuple[float, ...] = ()
    over: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    is_loss: bool = False
    """True if it reduces one of torch's loss functions."""
    weighed: float | None = None
    """The sum of the weights of the elements, where these have different weights."""
    target: float | None = None
    """The number that all targets have: a GAN's 1 and 0."""


def close(a: float, b: float) -> bool:
    """True if two factors are the same, up to one step of bfloat16."""
    return math.isclose(a, b, rel_tol=_CLOSE)


def terms_of(root: Tensor, seed: Tensor | None) -> list[LossTerm]:
    """Return the terms of what a backward begins at, with the gradient that it begins with."""
    if seed is not None and seed.numel() and not bool((seed == seed.flatten()[0]).all()):
        return [LossTerm("backward(gradient=...)", "unknown", 1.0)]
    with torch.enable_grad():
        total = root if not root.dim() else root.sum()
    start = LossTerm("", "", 1.0)
    start = start if seed is None else _times(start, float(seed.flatten()[0]))
    return list(_terms(total.grad_fn, start))


def _terms(root: Any, start: LossTerm) -> Iterator[LossTerm]:
    """Yield the reductions that a scalar is made of; `root` is its node of the graph."""
    waiting: list[tuple[Any, LossTerm]] = [(_without_sink(root, 0), start)]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node, so_far = waiting.pop()
        if node is None:
            continue
        name = node.name()
        below = [_without_sink(*edge) for edge in node.next_functions]
        if name in _SAME:
            waiting.append((below[0], so_far))
        elif name in _ADD:
            waiting.append((below[0], so_far))
            waiting.append((below[1], _times(so_far, getattr(node, "_saved_alpha", 1))))
        elif name.startswith(("MulBackward", "DivBackward")):
            scaled = _scaled(node, name, below, so_far)
            if scaled is not None:
                waiting.append(scaled)
            elif name[:3] == "Mul" and 0.0 in [
                _number(saved_by(node, side)) for side in ("self", "other")
            ]:
                yield replace(so_far, node=name, kind="zero")
            else:
                yield _not_read(node, below, so_far)
        elif name in _MEAN + _SUM and not saved_by(node, "self_sym_sizes"):  # of one number
            waiting.append((below[0], so_far))
        elif inside := _stacked_scalars(node, name):
            if name in _MEAN:
                so_far = replace(so_far, over=(*so_far.over, float(len(inside))))
            waiting += [(child, so_far) for child in inside]
        else:
            yield _reduction(node, name, below, so_far)
    yield LossTerm("a graph of more than 512 nodes", "unknown", 1.0)


def _without_sink(node: Any, place: int) -> Any:
    while node is not None and node.name() == DDP_SINK:
        node, place = node.next_functions[place]
    return node


def _reduction(node: Any, name: str, below: list[Any], so_far: LossTerm) -> LossTerm:
    reduction = saved_by(node, "reduction")
    inner = below[0] if name in _MEAN + _SUM else node
    while inner is not None and inner.name() in _VIEWS:
        inner = inner.next_functions[0][0]
    if inner is not None and (among := picks_among(inner)):
        return replace(so_far, node=inner.name(), kind="picked", count=among)
    if name in _MEAN + _SUM:
        sizes = tuple(saved_by(node, "self_sym_sizes") or ())
        inner, so_far = _without_factors(below[0], so_far)
        term = replace(so_far, node=name, kind="mean", count=math.prod(sizes), sizes=sizes)
        if _is_of_parameters(inner):
            return replace(so_far, node=name, kind="penalty")
        return _sum(inner, replace(term, kind="sum")) if name in _SUM else _mean(inner, term)
    if reduction in (1, 2):
        sizes, count = _loss_size(node)
        kind = "mean" if reduction == 1 else "sum"
        term = replace(so_far, node=name, kind=kind, count=count, sizes=sizes, is_loss=True)
        target = saved_by(node, "target")
        if isinstance(target, Tensor) and target.numel() > 1 and target.is_floating_point():
            first = float(target.flatten()[0])
            term = replace(term, target=first if bool((target == first).all()) else None)
        return replace(term, weighed=_class_weights(node)) if reduction == 2 else term
    return _not_read(node, below, so_far)


def _mean(inner: Any, term: LossTerm) -> LossTerm:
    """Return a mean over losses; one over labels that are ignored too is divided by all of them."""
    counted = _loss_size(inner)[1] if saved_by(inner, "reduction") == 0 else term.count
    if counted == term.count:
        return replace(term, is_loss=saved_by(inner, "reduction") == 0)
    return replace(term, kind="sum", count=counted, over=(*term.over, term.count), is_loss=True)


def _sum(inner: Any, term: LossTerm) -> LossTerm:
    """Return a sum of losses; factors of its elements are weights, or a mask."""
    count = math.prod(term.sizes)
    if saved_by(inner, "reduction") == 0:
        weights = _class_weights(inner)
        return replace(term, count=_loss_size(inner)[1], weighed=weights, is_loss=True)
    if inner is None:
        return term
    below = [child for child, _ in inner.next_functions]
    if inner.name() == "MulBackward0" and None in below:
        factor = saved_by(inner, "other" if below[1] is None else "self")
        return _weighed(term, factor, count)
    if inner.name() == "MaskedFillBackward0" and term.sizes:
        masked = _weighed(term, (~saved_by(inner, "mask")).float(), count)
        whole = math.prod(saved_by(below[0], "self_sym_sizes") or term.sizes)  # over classes, too
        return replace(masked, weighed=masked.count * whole / count) if whole > count else masked
    return term


def picks_among(node: Any) -> int:
    """Return the rows among which a node picks the largest, smallest or middle; 0 for others."""
    if not node.name().startswith(tuple(f"{name}Backward" for name in _PICK)):
        return 0
    tensor = saved_by(node, "self")
    sizes = tuple(
        tensor.shape if isinstance(tensor, Tensor) else saved_by(node, "self_sym_sizes") or ()
    )
    return sizes[0] if sizes and sizes[0] > 1 and 0 in (_dims(node, sizes) or [0]) else 0


def _not_read(node: Any, below: list[Any], so_far: LossTerm) -> LossTerm:
    name = node.name()
    if all(_is_of_parameters(child) for child in below):
        return replace(so_far, node=name, kind="penalty")
    shapes = [_shape(child) for child in below if hasattr(child, "_input_metadata")]
    curved = bool(shapes) and not any(shapes) and not isinstance(node, BackwardCFunction)
    return replace(so_far, node=name, kind="curved" if curved else "unknown")


def _dims(node: Any, sizes: Sequence[int]) -> list[int]:
    """Return the dimensions that a node reduces, in order; none if it reduces all of them."""
    dims = saved_by(node, "dim")
    dims = [] if dims is None else dims if isinstance(dims, tuple) else [dims]
    return sorted(_signed(dim) % len(sizes) for dim in dims) if sizes else []


def _signed(number: int) -> int:
    """Return a negative number that a node has saved as an unsigned one."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _without_factors(node: Any, so_far: LossTerm) -> tuple[Any, LossTerm]:
    """Return what a reduction is over, with the numbers that multiply and divide all of it."""
    while node is not None:
        name, below = node.name(), [child for child, _ in node.next_functions]
        is_product = name.startswith(("MulBackward", "DivBackward"))
        by_row = any(getattr(saved_by(node, side), "ndim", 0) for side in ("self", "other"))
        scaled = _scaled(node, name, below, so_far) if is_product and not by_row else None
        if scaled is None and name not in _SAME:
            break
        node, so_far = scaled or (below[0], so_far)
    return node, so_far


def _weighed(term: LossTerm, weights: Tensor | None, count: int) -> LossTerm:
    """Return a sum whose elements have weights: of a mask, those that are not masked count."""
    if weights is None:  # it has changed since
        return replace(term, kind="unknown")
    weights = weights.detach()
    times, rows = weights[weights != 0], count / max(weights.numel(), 1)
    if not times.numel() or bool((times == times[0]).all()):
        term = _times(term, float(times[0])) if times.numel() else term
        return replace(term, count=float(times.numel()) * rows)
    if _is_normalised(weights):
        name = "weights that may be normalised over this micro-batch alone"
        return replace(term, node=name, kind="unknown")
    return replace(term, count=count, weighed=float(weights.sum(dtype=torch.float64)) * rows)


def _is_normalised(weights: Tensor) -> bool:
    """True if one weight of each sample has mean 0 and deviation 1, or mean 1, or is at most 1."""
    if weights.numel() < 4 or weights.numel() != len(weights) or weights.equal(weights.round()):
        return False
    row = weights.double().flatten()
    is_largest = float(row.max()) == 1 and int((row == 1).sum()) == 1
    return _is_standard(row) or abs(float(row.mean()) - 1) < 1e-6 or is_largest


def _is_standard(row: Tensor) -> bool:
    deviations = [float(row.std(correction=correction)) for correction in (0, 1)]
    return abs(float(row.mean())) < 1e-5 and min(abs(d - 1) for d in deviations) < 1e-3


def _has_normalised_factor(node: Any) -> bool:
    """True if a node multiplies samples by constants that may be normalised over them."""
    below = [child for child, _ in node.next_functions]
    if node.name() != "MulBackward0" or None not in below:
        return False
    factor = saved_by(node, "other" if below[1] is None else "self")
    if not isinstance(factor, Tensor) or not 4 <= factor.numel() == len(factor):
        return False
    return factor.is_floating_point() and _is_normalised(factor.detach())


def _class_weights(node: Any) -> float | None:
    """Return the class weights of the labels of a loss, added; None if it has none."""
    weight, target = saved_by(node, "weight"), saved_by(node, "target")
    if not isinstance(weight, Tensor) or not isinstance(target, Tensor):
        return None
    if target.is_floating_point():
        return None
    return float(weight[target[(target >= 0) & (target < len(weight))]].sum(dtype=torch.float64))


def _is_of_parameters(node: Any) -> bool:
    """True for what is made of parameters alone: no sample takes part."""
    waiting = [node]
    for _ in range(_MOST_NODES):
        if not waiting:
            return True
        node = waiting.pop()
        if isinstance(getattr(node, "variable", None), torch.nn.Parameter):
            continue
        name = "" if node is None else node.name().partition("Backward")[0]
        below = [child for child, _ in node.next_functions] if name in _OF_PARAMETERS else []
        other = saved_by(node, "other" if below[:1] != [None] else "self") if None in below else 1
        ours = [child for child in below if child is not None]
        if name in ("Add", "Sub", "Rsub"):  # of a number, or of samples: those make it larger
            other = 1 if len({_shape(operand) for operand in (node, *ours)}) == 1 else other
        if not below or _number(other) is None:
            return False
        waiting += ours
    return False


def _shape(node: Any, place: int = 0) -> tuple[int, ...]:
    """Return the shape of what a node has computed."""
    return tuple(node._input_metadata[place].shape)


def _times(term: LossTerm, factor: Any) -> LossTerm:
    return term if factor in (1, -1) else replace(term, times=(*term.times, abs(float(factor))))


def _scaled(
    node: Any, name: str, below: list[Any], so_far: LossTerm
) -> tuple[Any, LossTerm] | None:
    """Return the operand of a product with, or quotient by, a number that can be read."""
    inputs = [child for child in below if child is not None]
    operands = [child for child in inputs if not _is_of_parameters(child)] or inputs
    is_first = operands == below[:1]
    if len(operands) != 1 or (name.startswith("Div") and not is_first):
        return None
    factor = _number(saved_by(node, "other" if is_first else "self"))
    if factor is None or factor == 0:
        return None
    if name.startswith("Mul"):
        return operands[0], _times(so_far, factor)
    return operands[0], replace(so_far, over=(*so_far.over, abs(factor)))


def _stacked_scalars(node: Any, name: str) -> list[Any]:
    """Return the losses of `torch.stack(losses).sum()`; an empty list of no stack."""
    sizes, inner = tuple(saved_by(node, "self_sym_sizes") or ()), node.next_functions[0][0]
    if name not in _MEAN + _SUM or inner is None or inner.name() not in _STACK:
        return []
    inside = [child for child, _ in inner.next_functions]
    return inside if sizes == (len(inside),) else []


def _loss_size(node: Any) -> tuple[tuple[int, ...], float]:
    """Return the shape that a loss function was given, and how many losses it reduces."""
    tensor = saved_by(node, "self")
    sizes = tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
    weight = _number(saved_by(node, "total_weight"))
    if weight is not None and saved_by(node, "reduction") == 1:
        return sizes, weight  # the labels that are not ignored, or their weights
    per_row = node.name().startswith(_PER_ROW)
    target = saved_by(node, "target") if per_row else None
    if isinstance(target, Tensor) and not node.name().startswith("Multilabel"):
        ignored = saved_by(node, "ignore_index")
        if ignored is None:
            return sizes, target.numel()
        return sizes, float((target != _signed(ignored)).sum())
    return sizes, (sizes[0] if sizes else 1) if per_row else math.prod(sizes)


def saved_by(node: Any, name: str) -> Any:
    """Return what the node keeps for its backward under this name; None if it cannot be read."""
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # the graph was used already, or the tensor has changed since
        return None


def _number(value: Any) -> float | None:
    """Return a scalar's value; None where there is none to read."""
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        return None
    try:
        return float(value.detach())
    except (RuntimeError, TypeError, NotImplementedError):  # a tensor without numbers
        return None


# --------------------------------------------------------------------- samples that are coupled


def loss_graph(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield the nodes of losses, down to the last layers that have parameters."""
    waiting = list(roots)
    visited = {None, *waiting}
    for node in waiting:  # it grows
        yield node
        if len(visited) > _MOST_LOSS_NODES or any(map(_is_weight, node.next_functions)):
            continue
        below = [child for child, _ in node.next_functions if child not in visited]
        visited.update(below)
        waiting += below


def _is_weight(edge: tuple[Any, int]) -> bool:
    """True for the parameter of a layer, but not for a single number such as a temperature."""
    node = edge[0]
    while node is not None and node.name() in _SAME:
        node = node.next_functions[0][0]
    variable = getattr(node, "variable", None)
    return isinstance(variable, Tensor) and variable.numel() > 1


def doubt_about(node: Any) -> str:
    """Return the reason why a node of a loss may couple the samples; "" if it is a plain one."""
    if picks_among(node):
        return "the loss sorts its samples, or picks the largest of them"
    if _has_normalised_factor(node):
        return (
            "the weights of the samples have mean 0 and deviation 1, or mean 1, or maximum 1 in a "
            "micro-batch, so they may be normalised in it"
        )
    name, shape = node.name().partition("Backward")[0], _shape(node)
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    shapes = [_shape(*edge) for edge in edges if not _is_of_parameters(edge[0])]
    is_product = name == "Mm" or (name == "Bmm" and shape[0] == 1)
    if name in _COMPARE or (is_product and len(shapes) == 2):
        return "the loss may compare samples with each other"
    is_spread = any(len(size) < len(shape) or size[:1] < shape[:1] for size in shapes)
    if name in _BY_ELEMENT and shape and is_spread:
        return "the loss has a statistic of the micro-batch in every sample"
    over = [size for size in shapes if size and size[0] > 1 and 0 in (_dims(node, size) or [0])]
    if name in _ALONG and shape and over:
        return "the loss has a statistic of the micro-batch"
    return ""
