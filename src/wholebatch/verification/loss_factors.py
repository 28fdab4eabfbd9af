"""Read the weight and the units of every micro-batch's loss from the terms of its graph.

    loss = F.mse_loss(out, y) * 0.5 / 4      weight 1/4; 0.5 is the loss's own

Plain rules decide if a number belongs to the loop or to the loss. Where two answers are possible,
both are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from wholebatch.verification.evidence import Counts
from wholebatch.verification.loss_terms import LossTerm, close

LOSS_SCALE = 64
"""A power of two from here on may be a loss scale."""
_Columns = list[tuple[float, ...]]
"""Factors or divisors of a term: each over the micro-batches."""


class Unreadable(Exception):
    """The weights cannot be read from the graph."""


@dataclass(frozen=True)
class Reading:
    """One way to read a term: the weight and the units of each micro-batch.

    In a proof, `means` are the gradients of the micro-batches' means, and `target` what they make.
    """

    weights: tuple[float, ...]
    units: tuple[float, ...]
    own: float = 1.0
    """The part of the weight that is the loss's own, such as 0.5 of `0.5 * mse`."""
    divisor: int = 0
    """The whole number of 3 or more that the loss is divided by, if it is not the steps."""
    is_mean_of_losses: bool = False
    """True if it is the mean of one of torch's losses."""
    means: Tensor | None = None
    target: Tensor | None = None

    @property
    def off(self) -> float:
        """Return how far the weights are from the shares of the units."""
        total = sum(self.units) or 1.0
        return self.apart([unit / total for unit in self.units])

    def apart(self, weights: Sequence[float]) -> float:
        """Return how far these weights are from others; a micro-batch without units has none."""
        if self.means is not None and self.target is not None:
            wanted = self.means.new_tensor(weights) @ self.means
            size = float(wanted.norm())
            return float((self.target - wanted).norm()) / size if size else math.inf
        rows = zip(self.weights, weights, self.units, strict=True)
        pairs = [(ours, other) for ours, other, units in rows if units]
        size = math.hypot(*(other for _, other in pairs))
        return math.hypot(*(ours - other for ours, other in pairs)) / (size or 1.0)

    @property
    def constant(self) -> float | None:
        """Return c where the weights are c × their shares of the units; None of other weights."""
        total = sum(self.units)
        ratios = [w * total / u for w, u in zip(self.weights, self.units, strict=True) if u and w]
        is_one = bool(ratios) and all(math.isclose(r, ratios[0], rel_tol=1e-3) for r in ratios)
        return ratios[0] if is_one else None


def is_loss_scale(factor: float) -> bool:
    """True for a power of two from 64 on."""
    power = math.log2(max(factor, 1e-300))
    return factor > LOSS_SCALE - 1 and abs(power - round(power)) < 1e-3


def read_terms(
    micro_batches: Sequence[Sequence[LossTerm]],
    counts: Counts,
    factors: Sequence[float],
    own: Sequence[float] = (),
) -> list[list[Reading]]:
    """Return for each term of a loss the ways to read it, with what the loop did to its gradients.

    Raises `Unreadable` where a term is not a plain mean or sum.
    """
    rows = [[t for t in terms if t.kind not in ("penalty", "zero")] for terms in micro_batches]
    for term in (term for row in rows for term in row):
        if term.kind in _NOT_READ:
            raise Unreadable(_NOT_READ[term.kind].format(term.node))
    if not rows or not rows[0]:
        raise Unreadable("its graph has no mean and no sum over samples")
    kinds = [[(term.node, term.kind) for term in row] for row in rows]
    if any(kind != kinds[0] for kind in kinds):
        raise Unreadable("the micro-batches' losses are made in different ways")
    columns = [list(column) for column in zip(*rows, strict=True)]
    times = _in_all([_constants(column, "times") for column in columns])
    over = _in_all([_constants(column, "over") for column in columns])
    loop = _LoopNumbers(counts, factors, len(columns), times, over)
    known: Sequence[float | None] = own if len(own) == len(columns) else [None] * len(columns)
    return [
        [_of_the_step(reading, factors, of_its_own) for reading in _readings(column, loop)]
        for column, of_its_own in zip(columns, known, strict=True)
    ]


_NOT_READ = {
    "curved": "it is a function of a mean over its samples ({})",
    "picked": "it picks among its samples ({})",
    "unknown": "its graph ends in {}, which is not understood",
}


def _of_the_step(reading: Reading, factors: Sequence[float], own: float | None) -> Reading:
    again = 1.0 if own is None else reading.own / own
    weights = tuple(w * f * again for w, f in zip(reading.weights, factors, strict=True))
    return replace(reading, weights=weights, own=reading.own if own is None else own)


@dataclass(frozen=True)
class _LoopNumbers:
    """The numbers that a loop may multiply or divide by: steps, ranks, units, a loss scale."""

    counts: Counts
    factors: Sequence[float]
    columns: int
    shared_times: Sequence[float]
    """Constant factors that every term of the loss has; a loop's factors are among them."""
    shared_over: Sequence[float]

    @property
    def factor(self) -> float:
        """Return what the loop puts on all gradients between the last backward and the step."""
        first = self.factors[0] * self.counts.ranks
        same = all(math.isclose(factor, self.factors[0], rel_tol=1e-3) for factor in self.factors)
        return first if same and first else 1.0

    def is_steps(self, value: float) -> bool:
        """True for the number of micro-batches, on one rank or on all."""
        count = self.counts.micro_batches
        steps = {count, self.counts.usual, count * self.counts.ranks}
        return any(close(value, number) for number in steps if number > 1)

    def is_total(self, value: float, units: Sequence[float]) -> bool:
        """True for the units of the window, on one rank or on all."""
        return any(close(value, sum(units) / over) for over in {1, self.counts.ranks})

    def is_of_the_loop(self, value: float, units: Sequence[float]) -> bool:
        """True if a constant factor or divisor is the loop's, and not the loss's own."""
        total, ranks, count = sum(units), self.counts.ranks, self.counts.micro_batches
        numbers = {count, self.counts.usual, ranks, count * ranks, count**2, self.factor}
        numbers |= {total, total / ranks, *([units[0]] if _same(units) else [])}
        inverse = {1 / number for number in numbers if number}
        if is_loss_scale(value):
            return True
        return any(close(value, number) for number in (numbers | inverse) if not close(number, 1))


def _readings(terms: Sequence[LossTerm], loop: _LoopNumbers) -> Iterator[Reading]:
    """Yield the ways to read one term over the micro-batches, the most likely first."""
    for units, base, used in _units(terms):
        times, over = _by_place(terms, "times"), _by_place(terms, "over")
        if used is not None:
            over.remove(used)
        over = [column for column in over if not _match(column, [1.0] * len(column))]
        is_mean = terms[0].kind == "mean" or used is not None
        own, divisor = _own(times, over, units, is_mean, loop)
        is_mean_of_losses = terms[0].kind == "mean" and terms[0].is_loss
        weights = [
            first * math.prod(t) / math.prod(o)
            for first, t, o in zip(base, _rows(times, base), _rows(over, base), strict=True)
        ]
        for scale in dict.fromkeys((own, 1.0)):
            own_weights = tuple(w / scale for w in weights)
            yield Reading(own_weights, tuple(units), scale, divisor, is_mean_of_losses)


def _units(
    terms: Sequence[LossTerm],
) -> Iterator[tuple[list[float], list[float], tuple[float, ...] | None]]:
    """Yield units, the weight of their mean before any factor, and the divisor it has used."""
    counts = [term.count for term in terms]
    if terms[0].kind == "mean":
        yield counts, [1.0] * len(counts), None
        return
    candidates = list(_units_of_sums(terms, counts))
    for by in sorted(_by_place(terms, "over"), key=_same):  # a sum over its own units is a mean
        for units in candidates:
            clamped = [max(unit, 1.0) for unit in units]  # `/ max(boxes, 1)`
            if not _match(by, [1.0] * len(by)) and (_match(by, units) or _match(by, clamped)):
                yield units, [1.0] * len(units), by
    for units in candidates:
        yield units, units, None


def _units_of_sums(terms: Sequence[LossTerm], counts: list[float]) -> Iterator[list[float]]:
    """Yield what the units of a sum may be: elements, their weights, rows, other labels."""
    yield counts
    weighed = [term.weighed for term in terms]
    if all(weighed):
        yield [weight or 0.0 for weight in weighed]
    if terms[0].is_loss and terms[0].node.startswith(("NllLoss", "SumBackward")):
        return  # labels that are not ignored
    if all(len(term.sizes) > 1 for term in terms):
        yield [float(term.sizes[0]) for term in terms]


def _own(
    times: _Columns, over: _Columns, units: Sequence[float], is_mean: bool, loop: _LoopNumbers
) -> tuple[float, int]:
    """Return the product of the constant factors that are the loss's own, and a whole divisor."""
    own, columns, divisor = 1.0, loop.columns, 0
    shared_times, shared_over = list(loop.shared_times), list(loop.shared_over)
    constant = [column[0] for column in over if _same(column)]
    has_steps = any(map(loop.is_steps, constant))
    for by in (column[0] for column in times if _same(column)):
        is_loop = _take(shared_times, by) and loop.is_of_the_loop(by, units)
        if not (is_loop or loop.is_total(1 / by, units)):
            own *= by
    for by in constant:
        is_shared = _take(shared_over, by)
        is_of_terms = columns > 1 and close(by, columns)
        if is_of_terms and columns != loop.counts.micro_batches:
            own, columns = own / by, 1
        elif loop.is_total(by, units) or (is_shared and loop.is_of_the_loop(by, units)):
            continue
        elif (by < 3 or not close(by, round(by))) and is_mean:
            own /= by
        elif (
            is_mean and is_shared and not has_steps and by <= 2 * max(loop.counts.micro_batches, 4)
        ):
            divisor = round(by)
        elif is_mean and has_steps:
            own /= by
    return own, divisor


# ------------------------------------------------------------------- factors over the micro-batches


def _by_place(terms: Sequence[LossTerm], name: str) -> _Columns:
    """Return each factor over the micro-batches: those that all have, then the others by place."""
    rest = [list(getattr(term, name)) for term in terms]
    columns: _Columns = []
    for value in getattr(terms[0], name):
        if all(any(close(value, other) for other in row) for row in rest):
            columns.append((value,) * len(rest))
            for row in rest:
                _take(row, value)
    if len({len(row) for row in rest}) > 1:  # a factor of 1 is not in the graph
        return [*columns, tuple(math.prod(row) for row in rest)]
    return [*columns, *zip(*rest, strict=True)]


def _rows(columns: _Columns, like: Sequence[float]) -> _Columns:
    return list(zip(*columns, strict=True)) if columns else [()] * len(like)


def _constants(terms: Sequence[LossTerm], name: str) -> list[float]:
    return [column[0] for column in _by_place(terms, name) if _same(column)]


def _in_all(lists: Sequence[Sequence[float]]) -> list[float]:
    """Return the numbers that all lists have."""
    rest = [list(values) for values in lists[1:]]
    return [
        value
        for value in lists[0]
        if all(any(close(value, other) for other in row) for row in rest)
        and all(_take(row, value) for row in rest)
    ]


def _take(values: list[float], value: float) -> bool:
    """Remove a value from a list; False if it is not there."""
    for place, other in enumerate(values):
        if close(other, value):
            del values[place]
            return True
    return False


def _same(values: Sequence[float]) -> bool:
    return all(close(value, values[0]) for value in values)


def _match(values: Sequence[float], others: Sequence[float]) -> bool:
    return all(close(a, b) for a, b in zip(values, others, strict=True))
