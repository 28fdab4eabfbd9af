"""The terms of a loss: means or sums, over how many, and the weight that each has in a backward.

    (F.cross_entropy(out, y) * 0.5 / 4).backward()     one mean over len(y), with weight 0.125

The weight is measured: it is the gradient that the backward gives to the term. The factors that the
graph shows (times 0.5, over 4) are kept beside it, to tell whose numbers they are. A term that is
not one of torch's losses, a mean or a sum is of kind "unknown", and its loop is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from wholebatch.audit.scalar_graph import number_of, saved_by
from wholebatch.verification.loss_ends import (
    TOO_LARGE,
    Scale,
    Scales,
    ends_of,
    is_of_parameters,
    operands_of,
    operation_of,
    passes_on,
    scaled,
    shape_of,
)

_MOST_LOSS_NODES = 1 << 13
_CLOSE = 4e-3
"""One step of bfloat16: a factor may have been rounded to it."""
_PICK = {"Max", "Min", "Amax", "Amin", "Median", "Nanmedian", "Kthvalue", "Topk", "Sort"}
_PER_ROW = ("NllLoss", "MultiMargin", "MultilabelMargin")
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
    weight: float = 1.0
    """The gradient of what was differentiated by this term."""

    def scaled(self, *scales: Scale) -> LossTerm:
        """Return the term with further scales."""
        return replace(self, scales=(*self.scales, *scales))


def close(a: float, b: float) -> bool:
    """True if two factors are the same, up to one step of bfloat16."""
    return math.isclose(a, b, rel_tol=_CLOSE)


class MeasuredLoss:
    """The terms of what a backward begins at; `terms` has their weights once it has run."""

    def __init__(self, roots: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
        self._terms: list[tuple[LossTerm, int, int]] = []
        """Each with the number of scales on top of it, and the place of its gradient."""
        self._gradients: list[Any] = []
        self._hooks: list[Any] = []
        nodes: set[Any] = set()
        for root, seed in zip(roots, seeds, strict=False):
            if seed is not None and seed.numel() and not bool((seed == seed.flatten()[0]).all()):
                self._add(LossTerm("backward(gradient=...)", "unknown", 1.0), 0, None)
                continue
            with torch.enable_grad():
                end = root.grad_fn if not root.dim() else root.sum().grad_fn
            outer = () if seed is None else (Scale("multiplied", float(seed.flatten()[0].abs())),)
            for node, scales in ends_of(end):
                so_far = LossTerm(TOO_LARGE, "unknown", 1.0, (*outer, *scales))
                if node is None or node not in nodes:
                    term = so_far if node is None else _reduction(node, so_far)
                    # A sum of our own is not in the graph that runs: its gradient is the seed.
                    is_ours = root.dim() > 0 and node is end
                    self._add(term, len(so_far.scales), None if is_ours else node)
                    nodes.add(node)

    def _add(self, term: LossTerm, outer: int, node: Any) -> None:
        place = len(self._gradients)
        self._terms.append((term, outer, place))
        self._gradients.append(None)
        if node is not None:
            self._hooks.append(node.register_prehook(partial(self._measure, place)))

    def _measure(self, place: int, gradients: Sequence[Tensor | None]) -> None:
        if gradients[0] is not None and gradients[0].numel() == 1:
            self._gradients[place] = gradients[0].detach().clone()

    def terms(self) -> tuple[LossTerm, ...]:
        """Return the terms with their weights; the hooks are gone then."""
        while self._hooks:
            self._hooks.pop().remove()
        return tuple(_measured(t, outer, self._gradients[place]) for t, outer, place in self._terms)


def _measured(term: LossTerm, outer: int, gradient: Tensor | None) -> LossTerm:
    """Return a term with the weight that was measured; what no factor explains is one, too."""
    read = product(term.scales)
    found = read if gradient is None else float(gradient) * product(term.scales[outer:])
    if close(abs(found), read) or not math.isfinite(found):  # a gradient in 16 bits is rounded
        found = math.copysign(read, found)
    elif read:
        term = term.scaled(Scale("multiplied", abs(found) / read))
    return replace(term, weight=found, kind=term.kind if found else "zero")


def product(scales: Sequence[Scale]) -> float:
    """Return what scales make together."""
    return math.prod(s.by if s.operation == "multiplied" else 1 / s.by for s in scales)


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


COMPARES = "compares samples"
"""A way in which a loss may couple its samples; the others are in `coupling_of`."""


def coupling_of(node: Any) -> str:
    """Return how a node of a loss may couple the samples; "" if it is a plain one."""
    if picks_among(node):
        return "sorts samples"
    if _has_normalised_factor(node):
        return "normalised weights"
    name, shape = operation_of(node), shape_of(node)
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    shapes = [shape_of(*edge) for edge in edges if not is_of_parameters(edge[0])]
    is_product = name == "Mm" or (name == "Bmm" and shape[0] == 1)
    if name in _COMPARE or (is_product and len(shapes) == 2):
        return COMPARES
    is_spread = any(len(size) < len(shape) or size[:1] < shape[:1] for size in shapes)
    if name in _BY_ELEMENT and shape and is_spread:
        return "statistic in every sample"
    over = [size for size in shapes if size and size[0] > 1 and 0 in (_dims(node, size) or [0])]
    return "statistic" if name in _ALONG and shape and over else ""
