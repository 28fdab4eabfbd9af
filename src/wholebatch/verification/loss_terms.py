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

from wholebatch.coupled.last_reduction import (
    TOO_LARGE,
    Scale,
    Scales,
    ends_of,
    is_of_parameters,
    number_of,
    operands_of,
    operation_of,
    passes_on,
    saved_by,
    scaled,
    shape_of,
)

_MOST_LOSS_NODES = 1 << 13
_CLOSE = 4e-3
"""One step of bfloat16: a factor may have been rounded to it."""
_PICK = {"Max", "Min", "Amax", "Amin", "Median", "Nanmedian", "Kthvalue", "Topk", "Sort"}
_PER_ROW = ("NllLoss", "MultiMargin", "MultilabelMargin")
COMPARES = "the loss may compare samples with each other"
COMPARES_OTHERS = "the loss may compare the samples of several micro-batches, kept without a graph"
_COMPARE = ("Cdist", "EuclideanDist", "Roll", "Flip")
"""Operations that bring samples together."""
_BY_ELEMENT = ("Add", "Sub", "Mul", "Div", "Expand", "Maximum", "Minimum", "Where", "Repeat")
_ALONG = (
    *("Softmax", "LogSoftmax", "Logsumexp", "Cumsum", "Mean", "Sum", "Var", "Std", "VarMean"),
    *("StdMean", "Norm", "LinalgVectorNorm"),
)
"""Operations along some dimensions: along the first one they make a statistic of the batch."""


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
    scales: Scales = ()
    sizes: tuple[int, ...] = ()
    is_loss: bool = False
    """True if it reduces one of torch's loss functions."""
    weighed: float | None = None
    """The sum of the weights of the elements, where these have different weights."""
    target: float | None = None
    """The number that all targets have: a GAN's 1 and 0."""

    @property
    def times(self) -> tuple[float, ...]:
        """Return the numbers that multiply it."""
        return tuple(s.by for s in self.scales if s.operation == "multiplied" and s.by != 1)

    @property
    def over(self) -> tuple[float, ...]:
        """Return the numbers that divide it."""
        return tuple(s.by for s in self.scales if s.operation == "divided")

    def scaled(self, *scales: Scale) -> LossTerm:
        """Return the term with further scales."""
        return replace(self, scales=(*self.scales, *scales))


def close(a: float, b: float) -> bool:
    """True if two factors are the same, up to one step of bfloat16."""
    return math.isclose(a, b, rel_tol=_CLOSE)


def terms_of(root: Tensor, seed: Tensor | None) -> list[LossTerm]:
    """Return the terms of what a backward begins at, with the gradient that it begins with."""
    if seed is not None and seed.numel() and not bool((seed == seed.flatten()[0]).all()):
        return [LossTerm("backward(gradient=...)", "unknown", 1.0)]
    with torch.enable_grad():
        total = root if not root.dim() else root.sum()
    outer = () if seed is None else (Scale("multiplied", abs(float(seed.flatten()[0]))),)
    return list(_terms(total.grad_fn, outer))


def _terms(root: Any, outer: Scales) -> Iterator[LossTerm]:
    """Yield the reductions that a scalar is made of; `root` is its node of the graph."""
    for node, scales in ends_of(root):
        so_far = LossTerm(TOO_LARGE, "unknown", 1.0, (*outer, *scales))
        inside = [] if node is None else _stacked_scalars(node)
        if inside:
            mean = (Scale("divided", float(len(inside))),) * (operation_of(node) == "Mean")
            for child in inside:
                yield from _terms(child, (*so_far.scales, *mean))
        else:
            term = so_far if node is None else _reduction(node, so_far)
            yield replace(term, kind="zero") if 0.0 in term.times else term


def _reduction(node: Any, so_far: LossTerm) -> LossTerm:
    name, reduction = node.name(), saved_by(node, "reduction")
    is_plain = operation_of(node) in ("Mean", "Sum")
    inner = operands_of(node)[0] if is_plain else node
    while inner is not None and (passes_on(inner) or operation_of(inner) in ("Slice", "Select")):
        inner = operands_of(inner)[0]
    if inner is not None and (among := picks_among(inner)):
        return replace(so_far, node=inner.name(), kind="picked", count=among)
    if is_plain:
        sizes = tuple(saved_by(node, "self_sym_sizes") or ())
        inner, so_far = _without_factors(operands_of(node)[0], so_far)
        term = replace(so_far, node=name, kind="mean", count=math.prod(sizes), sizes=sizes)
        if is_of_parameters(inner):
            return replace(so_far, node=name, kind="penalty")
        is_mean = operation_of(node) == "Mean"
        return _mean(inner, term) if is_mean else _sum(inner, replace(term, kind="sum"))
    if reduction in (1, 2):
        sizes, count = _loss_size(node)
        kind = "mean" if reduction == 1 else "sum"
        term = replace(so_far, node=name, kind=kind, count=count, sizes=sizes, is_loss=True)
        target = saved_by(node, "target")
        if isinstance(target, Tensor) and target.numel() > 1 and target.is_floating_point():
            first = float(target.flatten()[0])
            term = replace(term, target=first if bool((target == first).all()) else None)
        return replace(term, weighed=_class_weights(node)) if reduction == 2 else term
    return _not_read(node, so_far)


def _mean(inner: Any, term: LossTerm) -> LossTerm:
    """Return a mean over losses; one over labels that are ignored too is divided by all of them."""
    counted = _loss_size(inner)[1] if saved_by(inner, "reduction") == 0 else term.count
    if counted == term.count:
        return replace(term, is_loss=saved_by(inner, "reduction") == 0)
    term = term.scaled(Scale("divided", term.count))
    return replace(term, kind="sum", count=counted, is_loss=True)


def _sum(inner: Any, term: LossTerm) -> LossTerm:
    """Return a sum of losses; factors of its elements are weights, or a mask."""
    count = math.prod(term.sizes)
    if saved_by(inner, "reduction") == 0:
        weights = _class_weights(inner)
        return replace(term, count=_loss_size(inner)[1], weighed=weights, is_loss=True)
    if inner is None:
        return term
    below = operands_of(inner)
    if operation_of(inner) == "Mul" and None in below:
        factor = saved_by(inner, "other" if below[1] is None else "self")
        return _weighed(term, factor, count)
    if operation_of(inner) == "MaskedFill" and term.sizes:
        masked = _weighed(term, (~saved_by(inner, "mask")).float(), count)
        whole = math.prod(saved_by(below[0], "self_sym_sizes") or term.sizes)  # over classes, too
        return replace(masked, weighed=masked.count * whole / count) if whole > count else masked
    return term


def picks_among(node: Any) -> int:
    """Return the rows among which a node picks the largest, smallest or middle; 0 for others."""
    if operation_of(node) not in _PICK:
        return 0
    tensor = saved_by(node, "self")
    sizes = tuple(
        tensor.shape if isinstance(tensor, Tensor) else saved_by(node, "self_sym_sizes") or ()
    )
    return sizes[0] if sizes and sizes[0] > 1 and 0 in (_dims(node, sizes) or [0]) else 0


def _not_read(node: Any, so_far: LossTerm) -> LossTerm:
    if all(map(is_of_parameters, operands_of(node))):
        return replace(so_far, node=node.name(), kind="penalty")
    shapes = [shape_of(child) for child in operands_of(node) if hasattr(child, "_input_metadata")]
    curved = bool(shapes) and not any(shapes) and not isinstance(node, BackwardCFunction)
    return replace(so_far, node=node.name(), kind="curved" if curved else "unknown")


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
        by_row = any(getattr(saved_by(node, side), "ndim", 0) for side in ("self", "other"))
        inner = None if by_row else scaled(node)
        if inner is not None:
            node, so_far = inner[0], so_far.scaled(inner[1])
        elif passes_on(node):
            node = operands_of(node)[0]
        else:
            break
    return node, so_far


def _weighed(term: LossTerm, weights: Tensor | None, count: int) -> LossTerm:
    """Return a sum whose elements have weights: of a mask, those that are not masked count."""
    if weights is None:  # it has changed since
        return replace(term, kind="unknown")
    weights = weights.detach()
    times, rows = weights[weights != 0], count / max(weights.numel(), 1)
    if not times.numel() or bool((times == times[0]).all()):
        term = term.scaled(*(Scale("multiplied", abs(float(w))) for w in times.flatten()[:1]))
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
    below = operands_of(node)
    if operation_of(node) != "Mul" or None not in below:
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


def _stacked_scalars(node: Any) -> list[Any]:
    """Return the losses of `torch.stack(losses).sum()`; an empty list of no stack."""
    inner = operands_of(node)[0] if operation_of(node) in ("Mean", "Sum") else None
    if inner is None or operation_of(inner) not in ("Stack", "Cat"):
        return []
    inside = operands_of(inner)
    return inside if tuple(saved_by(node, "self_sym_sizes") or ()) == (len(inside),) else []


def _loss_size(node: Any) -> tuple[tuple[int, ...], float]:
    """Return the shape that a loss function was given, and how many losses it reduces."""
    tensor = saved_by(node, "self")
    sizes = tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
    weight = number_of(saved_by(node, "total_weight"))
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
    while node is not None and passes_on(node):
        node = node.next_functions[0][0]
    variable = getattr(node, "variable", None)
    return isinstance(variable, Tensor) and variable.numel() > 1


def compares_others(graph: Sequence[Any]) -> bool:
    """True if losses compare samples with rows that are joined to them and have no graph.

    Those of the window's other micro-batches, perhaps: each loss is that of the whole batch then,
    and its gradient that of one part of it. Such losses are added, and not divided.
    """
    joins = any(
        operation_of(node) == "Cat" and None in operands_of(node) and any(operands_of(node))
        for node in graph
    )
    return joins and COMPARES in map(doubt_about, graph)


def doubt_about(node: Any) -> str:
    """Return the reason why a node of a loss may couple the samples; "" if it is a plain one."""
    if picks_among(node):
        return "the loss sorts its samples, or picks the largest of them"
    if _has_normalised_factor(node):
        return (
            "the weights of the samples have mean 0 and deviation 1, or mean 1, or maximum 1 in a "
            "micro-batch, so they may be normalised in it"
        )
    name, shape = operation_of(node), shape_of(node)
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    shapes = [shape_of(*edge) for edge in edges if not is_of_parameters(edge[0])]
    is_product = name == "Mm" or (name == "Bmm" and shape[0] == 1)
    if name in _COMPARE or (is_product and len(shapes) == 2):
        return COMPARES
    is_spread = any(len(size) < len(shape) or size[:1] < shape[:1] for size in shapes)
    if name in _BY_ELEMENT and shape and is_spread:
        return "the loss has a statistic of the micro-batch in every sample"
    over = [size for size in shapes if size and size[0] > 1 and 0 in (_dims(node, size) or [0])]
    if name in _ALONG and shape and over:
        return "the loss has a statistic of the micro-batch"
    return ""
