"""Read from the autograd graph of a loss how it was made: a sum or a mean, and of which samples.

**Sum or mean.** `backward(total, units)` takes a sum and `backward(mean=, units=)` takes a mean.
The number itself does not tell which one was given, but the graph that made it does: its last
reduction is a mean over n elements or a sum, times the scalars that multiply it on the way.

    total = c · mean over n elements     is a sum if c is n or the units, and a mean otherwise

Only what is certain is refused. A graph that is not understood (a custom function, compiled code,
a product of two quantities) passes.

>>> import torch
>>> losses = torch.rand(6, requires_grad=True)
>>> check_sum(losses.sum(), 6), check_sum(losses.mean() * 6, 6), check_mean(losses.mean(), 6)
(None, None, None)
>>> check_sum(losses.mean(), 6)  # doctest: +ELLIPSIS
Traceback (most recent call last):
wholebatch.errors.LossError: total is a mean over 6 elements ...

**Linked samples.** A loss that is a sum over its samples has a gradient for the output of sample i
that depends on the outputs of sample i alone. So the derivative of that gradient by the output of
any other sample is zero:

    d/dz_j (d total / d z_i) = 0    for every j that is not of the same unit as i

Rows that are not zero are linked. Linked rows form parts (a pair of DPO, a list of a ranking), and
the loss must have at least as many parts as it has units. A contrastive loss has one. Only the
graph between the model's outputs and the loss is differentiated. Nothing is added to any `.grad`,
and the graph is kept for the backward that follows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from wholebatch.coupled.sample_runs import SCALE, emptied
from wholebatch.errors import LossError
from wholebatch.losses.loss import Units
from wholebatch.window.window import graph_nodes

_log = logging.getLogger("wholebatch")

_MOST_NODES = 512
_CLOSE = 4e-3  # one step of bfloat16: a factor may have been rounded to it

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
_JOINED, _REPEAT = ("StackBackward0", "CatBackward0"), "ExpandBackward0"
_PICK = ("Max", "Min", "Amax", "Amin", "Median", "Nanmedian", "Kthvalue", "Topk", "Sort")
# Functions without a second derivative: they link samples, and no gradient tells.
_KINKS = ("Relu", "LeakyRelu", "Threshold", "Hardtanh", "Clamp", "Abs", "Maximum", "Minimum")
_PER_ROW = ("NllLoss", "MultiMargin", "MultilabelMargin")
_VIEWS = _SAME | {"SliceBackward0", "SelectBackward0"}


def _signed(value: int) -> int:
    """Return a number that is given as 64 bits without a sign."""
    return value - 2**64 if value >= 2**63 else value


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of a scalar: a reduction, and the scalars that multiply and divide it."""

    node: str
    # "mean", "sum", "first" (`x.mean(0).sum()`), "joined" (`stack(losses).mean()`), "unknown" (not
    # understood), "zero" (times 0), "nonlinear" (a curve of a whole reduction, such as its root),
    # "regulariser" (of parameters alone), "picked" (the largest of a batch)
    kind: str
    count: float  # elements that the mean (or the sum) is over
    times: tuple[float, ...] = ()
    whole_number: bool = True  # of the factors: none of them is a float
    over: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    is_loss: bool = False  # the sum is one of torch's loss functions, or over such losses
    seed: float = 1.0  # of the backward that begins at it
    counted: float | None = None  # labels that are not ignored, where the mean is over all of them
    weighed: float | None = None  # the weights of the units, added, where they have some
    equal: float | None = None  # the one weight of all units, which is among `times`
    target: float | None = None  # where all labels are one number: a GAN's 1 and 0
    bent: str = ""  # a function that would change the whole loss, and did not change this one
    below: Any = None  # the node that has weights, that picks, or that a regulariser ends with
    among: int = 0  # of a "picked" term: the rows that it picks among
    plain: str = "mean"  # of a "picked" term: its kind, if those rows are not samples


def check_sum(total: Tensor, units: Units) -> None:
    """Refuse a mean that is given as a sum over `units`."""
    number = _number(units)
    if number is None or total.grad_fn is None:
        return
    terms = list(loss_terms(total.grad_fn))
    means = [term for term in terms if _is_mean(term, number)]
    added = [t for t in terms if t.kind == "mean" and not t.over and (t in means or t.count <= 1)]
    if not means or 1 < number <= len(added):  # as many means as units: one of each, added
        return
    term = means[0]
    what = f"a mean over {term.count:g} elements ({term.node})"
    if term.kind == "sum":
        what = f"a mean, a sum divided by {term.over[0]:g} ({term.node}, DivBackward)"
    if number == 0:
        way = "multiply it by the units of the micro-batch"
    else:
        way = (
            'take the sum (reduction="sum" in torch\'s losses), or say that it is a mean: '
            f"backward(mean=..., units={number:g}), or wb.mean_loss(mean, {number:g})"
        )
    if number == 1:
        way += "; units=1 is right for one sample, and for micro-batches of equal sizes"
    which = "total is" if len(means) == 1 else "terms of total are means: one is"
    raise LossError(
        f"{which} {what}, and must be the sum over its units={number:g}: its gradient would be "
        f"too small. What to do: {way} (audit=False: leave this check out)"
    )


def check_mean(mean: Tensor, units: Units) -> None:
    """Refuse a sum that is given as the mean over `units`, where that is certain."""
    number = _number(units)
    if number is None or number in (0.0, 1.0) or mean.grad_fn is None:
        return
    for term in loss_terms(mean.grad_fn):
        if term.kind != "sum" or not term.is_loss or term.count <= 1 or term.times or term.over:
            continue
        raise LossError(
            f"mean is a sum over {term.count:g} elements ({term.node}), and must be the mean over "
            f"its units={number:g}: its gradient would be too large. What to do: give it as the "
            f"sum it is, backward(total, units={number:g}), or take the mean (audit=False: leave "
            "this check out)"
        )


@dataclass(frozen=True, slots=True)
class TermWeight:
    """The weight of each element of a mean, or the factor of a penalty."""

    value: float
    count: float = math.nan  # of units; of elements, if equally many may be those of a parameter
    may_differ: bool = False  # a mean within each unit, or a penalty that is times the units

    def contradicts(self, other: TermWeight, of: str) -> bool:
        """True if the units of one micro-batch count for more than those of the other."""
        same = math.isclose(self.value, other.value, rel_tol=1e-4)
        may_differ = self.may_differ and other.may_differ
        return same == (of == "regulariser") and self.count != other.count and not may_differ


def check_parts(
    scalar: Tensor, units: Units, *, is_mean: bool, rows: int | None = None
) -> dict[tuple[str, int, int], TermWeight]:
    """Refuse a loss that is of its micro-batch alone; return the weight of each of its terms.

    A mean over other units than those that are given (a mask, labels that count, weights of
    classes) has another weight in each micro-batch, and so has a penalty on the weights that is
    added once per micro-batch to a sum. A "share" is the weight of a mean without the factors of
    the loss, which may be others in the next window.

    `rows` is the number of samples, if it is known: of one sample, with units=1, the mean may be
    over what it consists of.
    """
    number = _number(units)
    if number is None or scalar.grad_fn is None:
        return {}
    _refuse_scaled(scalar.grad_fn)
    terms = list(loss_terms(scalar.grad_fn)) if number > 0 else []
    means = [t for t in terms if t.kind in ("mean", "first") or (t.kind == "sum" and t.over)]
    alone = 1 < number == len(means)  # a mean of each unit, added
    found = {}
    for place, term in enumerate(terms):
        is_whole = len(terms) < min(number, 8)  # else each may be of one sample, in a loop
        bends = is_whole and term.kind == "nonlinear" and term.node.startswith(_KINKS)
        if number > 1 and (bends or term.kind == "picked"):
            what = "clamps the sum or mean" if bends else "picks among the samples"
            raise LossError(
                f"this loss {what} of its micro-batch ({term.node}), so that it is not a part of "
                "the whole batch's loss. Do it to the loss of each sample, before the mean; "
                "WholeBatch with loss=wb.Coupled(encode, loss) sees the whole batch (audit=False: "
                "leave this check out)"
            )
        if is_whole and term.bent and term.kind != "regulariser":
            found["bent", len(terms), place] = TermWeight(1.0)
        factor = math.prod(term.times) / math.prod(term.over)
        if term.kind == "regulariser" and not is_mean:
            if number > 1 and not term.times and not term.over and not _has_factor(term.below):
                refuse_weight("regulariser", 1.0, 1.0, units)
            made = TermWeight(factor, number, may_differ=_is_undone(term, (number,)))
            found["regulariser", len(terms), place] = made
        elif term in means and term.count > 0:
            count = 1.0 if term.kind == "sum" else term.count
            within = alone or _is_within_units(term, number, rows)
            of_all = count * math.prod(term.over) if _is_of_all(term) else math.nan
            made = TermWeight(factor * (number if is_mean else 1.0) / count, of_all, within)
            if not (term.kind == "sum" and term.times and math.prod(term.sizes) == 1):
                found["mean", len(terms), place] = made  # The weight of one unit is a factor.
            if is_mean and len(term.over) == (term.kind == "sum"):
                share = number / (count * math.prod(term.over))
                found["share", len(terms), place] = replace(made, value=share)
        elif is_mean and term.kind == "sum" and term.sizes[:1] == (number,) and number > 1:
            found["mean", len(terms), place] = TermWeight(factor * number)  # a sum over samples
    return found


def _is_of_all(term: LossTerm) -> bool:
    """True for a plain mean over all elements, which may be those of a parameter."""
    if term.kind == "sum":
        return close(math.prod(term.over), math.prod(term.sizes))
    return term.kind == "first" or (term.node in _MEAN and term.counted is None)


def _is_within_units(term: LossTerm, units: float, rows: int | None) -> bool:
    """True if a mean may be over what each unit consists of, which may differ in number."""
    per_row = term.node.startswith(_PER_ROW)
    elements = math.prod(term.sizes[:1] + term.sizes[2:] if per_row else term.sizes)
    if units == 1:
        is_one = term.sizes[:1] == (1,) or rows in (1, None)
        return is_one and (elements > 1 or (term.kind == "mean" and not per_row))
    over = math.prod(term.over) if term.kind == "sum" else term.count
    if term.counted is not None or not close(over, elements):
        return False
    return any(close(units, size) for size in (term.sizes[:1] if per_row else term.sizes))


def _has_factor(root: Any) -> bool:
    """True if a number multiplies or divides something in the graph at and below this node."""
    nodes = (n for n in graph_nodes([root]) if n.name().startswith(("MulBackward", "DivBackward")))
    return any(child is None for node in nodes for child, _ in node.next_functions)


def refuse_weight(kind: str, first: float, now: float, units: Units) -> None:
    """Refuse a term that has not the same weight in all micro-batches (see `check_parts`)."""
    if kind == "regulariser":
        what = (
            "holds a penalty on the weights that is added once per micro-batch, so that its share "
            "grows with their number: multiply it by the micro-batch's units"
        )
    else:
        what = (
            f"is a mean over other units than units={_number(units):g}: a sample would count "
            f"{now / first:.3g} times as much as one of an earlier micro-batch. Count what it is "
            "a mean over (samples, the elements of a mask, labels that are not ignored, their "
            'weights), or take the sum (reduction="sum") and say what it is over; several means '
            "over different units are wb.Loss.terms(...), after announce()"
        )
        if units == 1:
            what += ". Where a micro-batch is one sample, say so: losses[None].mean()"
    raise LossError(f"this loss {what} (audit=False: leave this check out)")


def _refuse_scaled(node: Any) -> None:
    """Refuse a loss that a GradScaler has scaled: its factor is a float32 tensor."""
    scale = saved_by(node, "other") if node.name().startswith("MulBackward") else None
    if isinstance(scale, Tensor) and scale.dtype is torch.float32 and not scale.dim():
        factor = float(scale)
        if factor >= 256 and math.frexp(factor)[0] == 0.5:
            raise LossError(
                f"the loss is multiplied by {factor:g}, as GradScaler.scale(loss) does: give the "
                "loss itself, and the scaler by close=wb.Close(scaler=scaler), which scales, "
                "unscales and updates it (audit=False: leave this check out)"
            )


def _is_mean(term: LossTerm, units: float) -> bool:
    """True if this term is certainly a mean, and no factor makes it a sum again."""
    if term.kind == "sum":
        return _is_divided_by_its_count(term, units)
    if term.count <= 1:
        return False
    if term.kind in ("first", "joined"):  # 2 may be the number of terms as well
        return units > 2 and close(term.count, units) and not _is_undone(term, (units,))
    if units == 1 and len(term.sizes) > 1 and term.sizes[0] == 1:
        return False  # one sample, and the mean over its features
    if _is_undone(term, (term.count, units)):
        return False
    factor = math.prod(term.times) / math.prod(term.over)
    if units == 0:
        return factor <= 1
    if factor > 1 and not term.whole_number:
        _log.warning(
            "total is a mean over %g elements times %g, for units=%g: taken as a sum with a weight "
            "of %g. If it is a mean, give backward(mean=..., units=%g)",
            term.count,
            factor,
            units,
            factor / units,
            units,
        )
        return False
    return True


def _is_divided_by_its_count(term: LossTerm, units: float) -> bool:
    """True for `losses.sum() / n`, where n is what `losses` are or the units."""
    if units <= 1 or len(term.over) != 1 or term.over[0] <= 1 or _is_undone(term, term.over):
        return False
    count = term.over[0]
    if close(count, term.count):
        return True
    # Of [units, units] losses, a division may be by the features; by 2, it may be of two terms.
    return close(count, units) and not close(units, 2) and term.count != units * units


def _is_undone(term: LossTerm, counts: tuple[float, ...]) -> bool:
    """True if the product of some factors is one of the counts."""
    times = term.times[:8]
    subsets = chain.from_iterable(combinations(times, k) for k in range(1, len(times) + 1))
    found = [math.prod(subset) for subset in subsets]
    found.append(math.prod(times) / math.prod(term.over))
    return any(close(value, count) for value in found for count in counts if count > 1)


def close(a: float, b: float) -> bool:
    """True if two factors are the same, up to one step of bfloat16."""
    return math.isclose(a, b, rel_tol=_CLOSE)


# --------------------------------------------------------------------- the graph


def loss_terms(root: Any) -> Iterator[LossTerm]:
    """Yield the reductions that a scalar is made of; `root` is its node of the graph."""
    waiting: list[tuple[Any, LossTerm]] = [(_without_sink(root, 0), LossTerm("", "", 1.0))]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node, so_far = waiting.pop()
        if node is None:
            continue
        name = node.name()
        below = [_without_sink(*edge) for edge in node.next_functions]
        if name in _SAME or name == _REPEAT:
            waiting.append((below[0], so_far))
        elif name.startswith(_KINKS) and _slope(node) == 1.0:
            waiting.append((below[0], replace(so_far, bent=name)))
        elif name in _ADD:
            waiting.append((below[0], so_far))
            waiting.append((below[1], _times(so_far, getattr(node, "_saved_alpha", 1))))
        elif name.startswith(("MulBackward", "DivBackward")):
            scaled = _scaled(node, name, below, so_far)
            if scaled is not None:
                waiting.append(scaled)
            elif name[:3] == "Mul" and 0.0 in [
                _number(saved_by(node, s)) for s in ("self", "other")
            ]:
                yield replace(so_far, node=name, kind="zero")
            else:
                yield _not_understood(node, below, so_far)
        elif name in _MEAN + _SUM and _is_of_one_number(node, below[0]):
            times = math.prod(saved_by(node, "self_sym_sizes") or ()) if name in _SUM else 1
            waiting.append((below[0], _times(so_far, times)))
        elif inside := _joined_scalars(node, name, below):
            if name in _MEAN:
                yield replace(so_far, node=name, kind="joined", count=len(inside))
                so_far = replace(so_far, over=(*so_far.over, float(len(inside))))
            waiting += [(child, _times(so_far, factor)) for child, factor in inside if factor]
        else:
            yield from _reduction(node, name, below, so_far)


def _is_of_one_number(node: Any, below: Any) -> bool:
    """True for a reduction of one number, which may be repeated for every sample."""
    repeats = below is not None and below.name() == _REPEAT
    repeats = repeats and math.prod(saved_by(below, "self_sym_sizes")) == 1
    return repeats or not saved_by(node, "self_sym_sizes")


def is_ddp_sink(node: Any) -> bool:
    """True for the node through which DistributedDataParallel passes the outputs of its model."""
    return node is not None and node.name() == "_DDPSinkBackward"


def _without_sink(node: Any, place: int) -> Any:
    while is_ddp_sink(node):
        node, place = node.next_functions[place]
    return node


def _reduction(node: Any, name: str, below: list[Any], so_far: LossTerm) -> Iterator[LossTerm]:
    reduction = saved_by(node, "reduction")
    inner = below[0] if name in _MEAN + _SUM else node
    while inner is not None and inner.name() in _VIEWS:
        inner = inner.next_functions[0][0]
    if inner is not None and (among := _picks_among(inner)):
        count = math.prod(saved_by(node, "self_sym_sizes") or ()) if inner is not node else 1
        picked = replace(so_far, node=inner.name(), kind="picked", count=count, below=inner)
        yield replace(picked, among=among, plain="sum" if name in _SUM else "mean")
    elif name in _MEAN + _SUM:
        sizes = tuple(saved_by(node, "self_sym_sizes") or ())
        inner, so_far = _without_factors(below[0], so_far)
        made = replace(so_far, node=name, kind="mean", count=math.prod(sizes), sizes=sizes)
        if _is_of_parameters(inner):
            yield replace(so_far, node=name, kind="regulariser", below=inner)
        elif name in _SUM:
            yield _sum(inner, replace(made, kind="sum"), so_far)
        else:
            of_losses = saved_by(inner, "reduction") == 0
            yield replace(made, counted=_loss_size(inner)[1] if of_losses else None)
    elif name == "NansumBackward0" and (given := saved_by(node, "self")) is not None:
        count = float((~given.isnan()).sum())
        yield replace(so_far, node=name, kind="sum", count=count, sizes=tuple(given.shape))
    elif (weights := _product_with(node, name, below)) is not None:
        inner = next(child for child in below if child is not None)
        of_losses = saved_by(_without_factors(inner, so_far)[0], "reduction") == 0
        so_far = replace(so_far, node=name, kind="sum", sizes=(weights.numel(),), is_loss=of_losses)
        yield _weighed(replace(so_far, below=inner), weights, weights.numel())
    elif reduction in (1, 2):
        kind = "mean" if reduction == 1 else "sum"
        sizes, count = _loss_size(node)
        made = replace(so_far, node=name, kind=kind, count=count, sizes=sizes, is_loss=True)
        target = saved_by(node, "target")
        if isinstance(target, Tensor) and target.numel() > 1 and target.is_floating_point():
            first = float(target.flatten()[0])
            made = replace(made, target=first if bool((target == first).all()) else None)
        yield replace(made, weighed=_class_weights(node)) if reduction == 2 else made
    else:
        yield _not_understood(node, below, so_far)


@torch.no_grad()
def _slope(node: Any) -> float | None:
    """Return the derivative of a function of one number, where it is; None of more numbers."""
    made, below = node._input_metadata[0], [child for child, _ in node.next_functions]
    if len(made.shape) or len(below) - below.count(None) != 1:
        return None
    try:
        slopes = node(torch.ones((), dtype=made.dtype, device=made.device))
    except RuntimeError:  # the graph was used already
        return None
    return _number(slopes if isinstance(slopes, Tensor) else slopes[0])


def _picks_among(node: Any) -> int:
    """Return the rows among which a node picks the largest, smallest or middle; 0 for others."""
    if not node.name().startswith(tuple(f"{name}Backward" for name in _PICK)):
        return 0
    given = saved_by(node, "self")
    sizes = tuple(
        given.shape if isinstance(given, Tensor) else saved_by(node, "self_sym_sizes") or ()
    )
    return sizes[0] if sizes and sizes[0] > 1 and 0 in (_dims(node, sizes) or [0]) else 0


def _not_understood(node: Any, below: list[Any], so_far: LossTerm) -> LossTerm:
    name = node.name()
    if all(_is_of_parameters(child) for child in below):
        return replace(so_far, node=name, kind="regulariser", below=node)
    shapes = [
        tuple(one._input_metadata[0].shape) for one in below if hasattr(one, "_input_metadata")
    ]
    curved = bool(shapes) and not any(shapes) and not name.endswith("FunctionBackward")
    return replace(so_far, node=name, kind="nonlinear" if curved else "unknown")


def _sum(inner: Any, made: LossTerm, so_far: LossTerm) -> LossTerm:
    """Return a sum of per-unit losses, or of means over the first dimension (`x.mean(0).sum()`).

    `inner` is what is summed, and `made` the sum if nothing more is known of it.
    """
    count = math.prod(made.sizes)
    if (rows := _mean_over_rows(inner)) and count != rows:
        return replace(so_far, node=inner.name(), kind="first", count=rows)
    if saved_by(inner, "reduction") == 0:
        weights = _class_weights(inner)
        return replace(made, count=_loss_size(inner)[1], weighed=weights, is_loss=True)
    if inner is None:
        return made
    below = [child for child, _ in inner.next_functions]
    if inner.name() == "MulBackward0" and None in below:
        factor = saved_by(inner, "other" if below[1] is None else "self")
        mean = _without_factors(below[0] or below[1], so_far)[0]
        if factor is not None and (rows := _mean_over_rows(mean)):
            print_ = float(_mixed(factor.detach()))  # it tells if they change with the batch
            return replace(made, node=mean.name(), kind="first", count=rows, weighed=print_)
        return _weighed(replace(made, below=below[0] or below[1]), factor, count)
    if inner.name() == "MaskedFillBackward0" and made.sizes:
        masked = _weighed(made, (~saved_by(inner, "mask")).float(), count)
        whole = math.prod(saved_by(below[0], "self_sym_sizes") or made.sizes)  # over classes, too
        return replace(masked, weighed=masked.count * whole / count) if whole > count else masked
    return made


def _mean_over_rows(node: Any) -> int:
    """Return how many rows a mean over the leading dimensions is of; 0 for other nodes."""
    if node is None or node.name() != "MeanBackward1":
        return 0
    given = tuple(saved_by(node, "self_sym_sizes") or ())
    dims = _dims(node, given)
    is_leading = bool(given) and dims == list(range(len(dims)))
    return math.prod(given[: len(dims)]) if is_leading else 0


def _dims(node: Any, sizes: Sequence[int]) -> list[int]:
    """Return the dimensions that a node reduces, in order; none if it reduces all of them."""
    dims = saved_by(node, "dim")
    dims = [] if dims is None else dims if isinstance(dims, tuple) else [dims]
    return sorted(_signed(dim) % len(sizes) for dim in dims) if sizes else []


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


def _product_with(node: Any, name: str, below: list[Any]) -> Tensor | None:
    """Return the weights of `torch.dot(losses, weights)`, or of an einsum to one number."""
    if name not in ("DotBackward0", "BmmBackward0", "MmBackward0") or below.count(None) != 1:
        return None
    other = "tensor" if name.startswith("Dot") else "mat2"
    weights = saved_by(node, other if below[1] is None else "self")
    inner = next(child for child in below if child is not None)
    shapes = [tuple(one.shape) for one in getattr(inner, "_input_metadata", ())]
    return weights if shapes and math.prod(shapes[0]) == weights.numel() else None


def _weighed(term: LossTerm, weights: Tensor | None, count: int) -> LossTerm:
    """Return a sum whose units have weights: of a mask, those that are not masked count."""
    if weights is None:  # it has changed since
        return replace(term, kind="unknown")
    weights = weights.detach()
    times, rows = weights[weights != 0], count / max(weights.numel(), 1)
    if not times.numel() or bool((times == times[0]).all()):
        term = _times(term, float(times[0])) if times.numel() else term
        equal = abs(float(times[0])) if times.numel() else None
        return replace(term, count=float(times.numel()) * rows, equal=equal)
    return replace(term, count=count, weighed=float(weights.sum(dtype=torch.float64)) * rows)


def _class_weights(node: Any) -> float | None:
    """Return the class weights of the labels of a loss, added; None if it has none."""
    weight, target = saved_by(node, "weight"), saved_by(node, "target")
    if (
        not isinstance(weight, Tensor)
        or not isinstance(target, Tensor)
        or target.is_floating_point()
    ):
        return None
    return float(weight[target[(target >= 0) & (target < len(weight))]].sum(dtype=torch.float64))


_OF_PARAMETERS = {
    *("Pow", "Abs", "Exp", "Log", "Neg", "Mul", "Div", "Add", "Sub", "Rsub", "Sum", "Mean", "Sqrt"),
    *("Select", "Slice", "Unsqueeze", "Squeeze", "View", "LinalgVectorNorm", "Norm", "Clamp", "T"),
    *("Softplus", "Sigmoid", "Tanh", "Reciprocal", "Permute", "Clone", "ToCopy", "Stack", "Cat"),
}


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
            other = 1 if len({_shape(one) for one in (node, *ours)}) == 1 else other
        if not below or _number(other) is None:
            return False
        waiting += ours
    return False


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node._input_metadata[0].shape)


def _times(term: LossTerm, factor: Any) -> LossTerm:
    return term if factor in (1, -1) else replace(term, times=(*term.times, abs(float(factor))))


def _scaled(
    node: Any, name: str, below: list[Any], so_far: LossTerm
) -> tuple[Any, LossTerm] | None:
    """Return the operand of a product with, or quotient by, a number that can be read."""
    given = [child for child in below if child is not None]
    operands = [child for child in given if not _is_of_parameters(child)] or given
    is_first = operands == below[:1]
    if len(operands) != 1 or (name.startswith("Div") and not is_first):
        return None
    other = saved_by(node, "other" if is_first else "self")
    whole = isinstance(other, int) or (isinstance(other, Tensor) and not other.is_floating_point())
    factor = _number(other)
    if factor is None or factor == 0:
        return None
    if name.startswith("Mul"):
        so_far = replace(so_far, times=(*so_far.times, abs(factor)))
        whole |= abs(factor) == 1
        return operands[0], replace(so_far, whole_number=so_far.whole_number and whole)
    return operands[0], replace(so_far, over=(*so_far.over, abs(factor)))


def _joined_scalars(node: Any, name: str, below: list[Any]) -> list[tuple[Any, float]]:
    """Return the losses and weights of `torch.stack(losses).mul(weights).sum()`; [] of no stack."""
    sizes = tuple(saved_by(node, "self_sym_sizes") or ())
    if name not in _MEAN + _SUM or len(sizes) != 1 or below[0] is None:
        return []
    inner, factors = below[0], torch.ones(sizes, dtype=torch.float64)
    while inner.name() == "MulBackward0" and inner.next_functions[1][0] is None:
        weights = saved_by(inner, "other")
        if not isinstance(weights, Tensor) or weights.numel() not in (1, *sizes):
            return []
        factors, inner = factors * weights.detach().cpu(), inner.next_functions[0][0]
    inside = [child for child, _ in inner.next_functions]
    if inner.name() not in _JOINED or sizes != (len(inside),):
        return []
    return list(zip(inside, factors.tolist(), strict=True))


def _loss_size(node: Any) -> tuple[tuple[int, ...], float]:
    """Return the shape that a loss function was given, and how many losses it reduces."""
    given = saved_by(node, "self")
    sizes = tuple(given.shape) if isinstance(given, Tensor) else ()
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


# --------------------------------------------------------------------- linked samples

_MOST_ELEMENTS = 1 << 24
_MOST_ROWS = 1 << 13
_MOST_NODES_BELOW = 1 << 13
_MOST_PASSES = 64
_LINKED = 1e-6
_NOT_LINEAR = (
    "a backward of this loss from 1024 does not give 1024 times the gradient: a hook on a tensor "
    "clips, normalises or adds, and gradients have another size in a window than in the backward "
    "of a mean. Do that once per update, on the whole gradient: a hook on the parameter "
    "(parameter.register_hook) runs so (audit=False: leave this check out)"
)

_Row = tuple[int, int]  # the number of rows of an output, and which of them


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that a model gave back, and which of its dimensions counts the samples."""

    tensor: Tensor
    dim: int = 0

    @property
    def rows(self) -> int:
        return self.tensor.shape[self.dim]


def linked_samples(total: Tensor, outputs: Sequence[Tensor], units: float) -> list[int] | None:
    """Return the samples that the loss links with one of them; [] if it has enough parts.

    `outputs` have one row for each sample in their first dimension. [] is also returned where it
    cannot be told: the loss does not depend on these outputs, or its graph cannot be differentiated
    twice. None: the outputs have one row, and another micro-batch may tell more.
    """
    if all(tensor.shape[0] == 1 for tensor in outputs):
        return None
    distinct = {id(tensor): tensor for tensor in outputs}.values()
    watched = [_Output(tensor) for tensor in distinct if _can_be_asked(tensor)]
    nodes: set[Any] = {output.tensor.grad_fn for output in watched}
    if not watched or not _can_run_again(total, nodes):
        return []
    hooks = [output.tensor._backward_hooks for output in watched]  # of Fabric's, for one
    if _has_distances(total, nodes) or _sorts_samples(total, nodes, watched):
        return list(range(watched[0].rows))
    for cut in (False, True):
        try:
            with emptied(hooks), ExitStack() as stack:
                for node in nodes if cut else ():  # No gradient reaches another output upstream.
                    stack.enter_context(node.register_prehook(lambda made: (None,) * len(made)))
                return _linked(total, watched, units)
        except (RuntimeError, NotImplementedError):  # an operation without a second derivative
            continue  # It may lie between two outputs, and not between them and the loss.
    return []


def _linked(total: Tensor, watched: Sequence[_Output], units: float) -> list[int]:
    linked = _Links(total, watched).linked_rows(units)
    others = [
        replace(one, dim=1) if may_be_time_first(one.tensor.shape, units) else one
        for one in watched
    ]
    if linked and others != watched:  # [time, samples, ...]: the rows may be time steps
        return linked if _Links(total, others).linked_rows(units) else []
    return linked


def _can_be_asked(tensor: Tensor) -> bool:
    """True for an output of a graph whose gradient can be taken without a side effect."""
    return (
        tensor.grad_fn is not None
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and tensor.dim() > 0
        and 1 < tensor.shape[0] <= _MOST_ROWS
        and tensor.numel() <= _MOST_ELEMENTS
        and not tensor.retains_grad
    )


def may_be_time_first(shape: Sequence[int], units: float) -> bool:
    """True if an output of this shape may be [time, samples, ...], by the number of units."""
    if len(shape) < 3 or shape[1] < 2:
        return False
    by_units = shape[1] == units or (len(shape) == 3 and shape[0] < units <= shape[0] * shape[1])
    return by_units or shape[0] == shape[1]


def _can_run_again(total: Tensor, until: set[Any]) -> bool:
    """False if a custom autograd function is on the way: it may change what it has saved."""
    return not any(
        isinstance(node, BackwardCFunction) or number > _MOST_NODES_BELOW
        for number, node in enumerate(graph_nodes([total], until))
    )


def _has_distances(total: Tensor, until: set[Any]) -> bool:
    """True if a loss has the distances of all samples: torch cannot differentiate those twice."""
    for node in graph_nodes([total], until):
        if node.name() in ("CdistBackward0", "PdistBackward0"):
            made = [tuple(one.shape) for one in getattr(node, "_input_metadata", ())]
            samples = [child for child, _ in node.next_functions if child is not None]
            ours = not any(_is_of_parameters(child) for child in samples)
            if ours and made and len(made[0]) == (2 if node.name().startswith("C") else 1):
                return len(samples) == (2 if node.name().startswith("C") else 1)
    return False


def _sorts_samples(total: Tensor, until: set[Any], outputs: Sequence[_Output]) -> bool:
    """True if a loss sorts a number of every sample, or of every pair: it compares their places."""
    rows = {(size,) for o in outputs for size in (o.rows, o.rows // 2) if size > 1}
    sorts = [node for node in graph_nodes([total], until) if node.name() == "SortBackward0"]
    return any(tuple(saved_by(node, "self_sym_sizes") or ()) in rows for node in sorts)


def normalised_over_samples(total: Tensor, outputs: Sequence[Tensor], units: float) -> str | None:
    """Return what in a loss was normalised over exactly these samples; None if nothing was.

    That are a factor or a target with mean 0 and deviation 1, and weights that add up to 1 or to
    their number although they are not all the same.
    """
    for node in graph_nodes([total], {output.grad_fn for output in outputs}):
        below, target = [child for child, _ in node.next_functions], saved_by(node, "target")
        if isinstance(target, Tensor) and is_standard(target):
            return "a target in this loss has mean 0 and deviation 1"
        if node.name() != "MulBackward0" or None not in below:
            continue
        given = saved_by(node, "other" if below[1] is None else "self")
        if not isinstance(given, Tensor) or not 4 <= given.numel() == given.shape[0]:
            continue
        factor = given.detach().double().flatten()
        if is_standard(factor[:, None]):
            return "a factor of the samples in this loss has mean 0 and deviation 1"
        varies = float(factor.std()) > 1e-3 * float(factor.abs().max())
        mean = float(factor.mean()) if varies and units == len(factor) else 0.0
        adds_up = min(abs(mean - 1), abs(mean * units - 1)) < 1e-5
        if adds_up and not factor.equal(factor.round()):
            return "the factors of the samples in this loss add up to 1, or to their number,"
    return None


@torch.no_grad()
def is_standard(rows: Tensor) -> bool:
    """True if a tensor has mean 0 and deviation 1 over its rows: by column, channel or as a whole.

    Not if each row has. Columns that are constant are left out.
    """
    wide = rows.dtype in (torch.float32, torch.float64) and rows.layout is torch.strided
    if not wide or rows.dim() < 2 or len(rows) < 4 or not rows.numel():
        return False
    others = tuple(range(1, rows.dim()))
    for dims in ((0,), (0, *others[1:]), (0, *others)):
        variance, mean = torch.var_mean(rows, dims, correction=0)
        varies = variance > 1e-6
        if not bool(varies.any()) or float(mean.abs().max()) > 1e-5:
            continue
        count = rows.numel() / mean.numel()
        spread = variance[varies].sqrt()
        off = min(float((spread * s - 1).abs().max()) for s in (1, (count / (count - 1)) ** 0.5))
        by_row = len(dims) > 1 and float(rows[0].mean([dim - 1 for dim in dims[1:]]).abs().max())
        if off < 1e-3 and (len(dims) == 1 or by_row > 1e-5) and not rows.equal(rows.round()):
            return True
    return False


def links_columns(total: Tensor, outputs: Sequence[Tensor], units: float) -> bool:
    """True if a loss links what lies in the second dimension of an output: that is not samples."""
    asked = [_Output(one, 1) for one in outputs if one.dim() > 1 and _can_be_asked(one)]
    try:
        return bool(asked and _Links(total, asked).linked_rows(units))
    except (RuntimeError, NotImplementedError):  # an operation without a second derivative
        return False


class _Links:
    """The rows of outputs, and which of them the loss links."""

    def __init__(self, total: Tensor, outputs: Sequence[_Output]) -> None:
        tensors = [output.tensor for output in outputs]
        with _plain(total):
            made = torch.autograd.grad(total, tensors, create_graph=True, allow_unused=True)
        _refuse_bent(total, tensors, made)
        found = [(o, g) for o, g in zip(outputs, made, strict=True) if g is not None]
        self._total = total
        self._slopes = [(o, g) for o, g in found if bool(g.isfinite().all())]
        sizes = [output.rows for output, _ in self._slopes]
        self._sizes = sorted(set(sizes))
        # Two outputs of one size may be of different samples, which a third one joins.
        self._most = min((size for size in sizes if sizes.count(size) > 1), default=_MOST_ROWS)
        self._parents: dict[_Row, _Row] = {}
        self._asked: set[_Row] = set()

    def linked_rows(self, units: float) -> list[int]:
        """Return the rows linked with one another if there are fewer parts than units."""
        for row in self._rows_to_ask():
            for other in self._links_of(row):
                self._join(row, other)
            for size in self._sizes:
                roots = {self._root((size, index)) for index in range(size)}
                if len(roots) < min(int(units), size, self._most):
                    own = self._root(row)
                    return [i for i in range(row[0]) if self._root((row[0], i)) == own]
            if len(self._asked) >= _MOST_PASSES:
                break
        return []

    def _rows_to_ask(self) -> Iterator[_Row]:
        """Yield two rows of each size; then, if any is linked, the linked ones and all others."""
        yield from ((size, row) for size in self._sizes for row in (0, size // 2))
        if self._parents:
            yield from (row for row in list(self._parents) if row not in self._asked)
            for size in self._sizes:
                yield from ((size, row) for row in range(size) if (size, row) not in self._asked)

    def _links_of(self, row: _Row) -> list[_Row]:
        """Return the rows whose outputs move the gradient of this one."""
        self._asked.add(row)
        tensors = [output.tensor for output, _ in self._slopes]
        with _plain(self._total):
            own = [(o, slope) for o, slope in self._slopes if o.rows == row[0]]
            asked = torch.stack([_mixed(slope.select(o.dim, row[1])) for o, slope in own]).sum()
            if not asked.requires_grad:  # a loss that is linear in the outputs
                return []
            moved = torch.autograd.grad(asked, tensors, retain_graph=True, allow_unused=True)
        found = [
            (o.rows, m.nan_to_num().abs().movedim(o.dim, 0).reshape(o.rows, -1).amax(1))
            for (o, _), m in zip(self._slopes, moved, strict=True)
            if m is not None
        ]
        largest = max((float(move.max()) for _, move in found), default=0.0)
        linked = [
            (rows, index)
            for rows, move in found
            for index in (move > _LINKED * largest).nonzero().flatten().tolist()
        ]
        return [other for other in linked if other != row]

    def _root(self, row: _Row) -> _Row:
        while row in self._parents and self._parents[row] != row:
            row = self._parents[row]
        return row

    def _join(self, a: _Row, b: _Row) -> None:
        a, b = self._root(a), self._root(b)
        self._parents.setdefault(a, a)
        self._parents[b] = a


def _refuse_bent(total: Tensor, tensors: Sequence[Tensor], made: Sequence[Tensor | None]) -> None:
    """Refuse a backward that is not linear in the number from which it starts."""
    if any(tensor.dtype is torch.float16 for tensor in tensors):  # It knows nothing below 6e-8.
        return
    for scale in (SCALE, 1 / SCALE):
        with _plain(total):
            seed = torch.full_like(total, scale)
            scaled = torch.autograd.grad(total, tensors, seed, retain_graph=True, allow_unused=True)
        for one, other in zip(made, scaled, strict=True):
            if one is not None and other is not None:
                _refuse_other_size(one * scale, other)


@torch.no_grad()
def _refuse_other_size(gradient: Tensor, scaled: Tensor) -> None:
    gap, size = torch.linalg.vector_norm(gradient - scaled), torch.linalg.vector_norm(scaled)
    if bool(size.isfinite()) and bool(gap > 1e-2 * size):
        raise LossError(_NOT_LINEAR)


def check_hooks(tensor: Tensor) -> None:
    """Let the hooks of a tensor that change its gradient be refused if they are not linear."""

    def checked(hook: Callable[[Tensor], Any], gradient: Tensor) -> Any:
        made = hook(gradient)
        if isinstance(made, Tensor):
            for scale in (SCALE, 1 / SCALE):
                _refuse_other_size(made * scale, hook(gradient * scale))
        return made

    hooks = tensor._backward_hooks or {}
    for key, hook in hooks.items():
        hooks[key] = partial(checked, hook)


def _mixed(slope: Tensor) -> Tensor:
    """Return one number of a row's gradient, in which no two elements have the same weight."""
    places = torch.arange(slope.numel(), device=slope.device)
    wide = slope.dtype if slope.dtype is torch.float64 else torch.float32
    return (slope.flatten().to(wide) * (places * 1.7 + 0.3).cos().to(wide)).sum()


@contextmanager
def _plain(total: Tensor) -> Iterator[None]:
    """Differentiate as a backward does: with a graph, and without autocast."""
    with torch.enable_grad(), torch.autocast(total.device.type, enabled=False):
        yield
