"""Tell the loop's part of a measured weight from the loss's own.

    loss = F.mse_loss(out, y) * 0.5 / 4      measured 0.125: 1/4 is the loop's, 0.5 the loss's own

A factor that every micro-batch has may be the loss's own, but for a division by what the loop
counts: micro-batches, ranks, units. Where a factor may be either (4 of `4 * mse / 4`), all readings
are given: a window that is right by one of them is right.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from wholebatch.verification.evidence import Counts
from wholebatch.verification.loss_ends import Scale
from wholebatch.verification.loss_terms import LossTerm, close, product

LOSS_SCALE = 64
"""A power of two from here on may be a loss scale."""
_MOST_FACTORS = 6


class Unreadable(Exception):
    """The weights cannot be read from the graph."""


@dataclass(frozen=True)
class Reading:
    """One way to read a term: the weight and the units of each micro-batch."""

    weights: tuple[float, ...]
    units: tuple[float, ...]
    own: float = 1.0
    """The part of the weight that is the loss's own, such as 0.5 of `0.5 * mse`."""
    divisor: int = 0
    """The whole number of 3 or more that the loss is divided by, if it is not the micro-batches."""
    is_mean_of_losses: bool = False
    """True if it is the mean of one of torch's losses."""

    @property
    def off(self) -> float:
        """Return how far the weights are from the shares of the units."""
        total = sum(self.units) or 1.0
        return self.apart([unit / total for unit in self.units])

    def apart(self, weights: Sequence[float]) -> float:
        """Return how far these weights are from others; a micro-batch without units has none."""
        rows = zip(self.weights, weights, self.units, strict=True)
        pairs = [(ours, other) for ours, other, units in rows if units]
        size = math.hypot(*(other for _, other in pairs))
        return math.hypot(*(ours - other for ours, other in pairs)) / (size or 1.0)

    def with_own(self, own: float) -> Reading:
        """Return the reading if the loss has this weight of its own."""
        weights = tuple(weight * self.own / own for weight in self.weights)
        return replace(self, weights=weights, own=own)

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
    known_units: Sequence[float] = (),
) -> list[list[Reading]]:
    """Return for each term of a loss the ways to read it, with what the loop did to its gradients.

    `known_units` are the units of a loss with one term, if they are known. Raises `Unreadable`
    where a term is not a plain mean or sum.
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
    columns = list(zip(*rows, strict=True))
    units = [
        [list(known_units)] if known_units and len(columns) == 1 else _units(c) for c in columns
    ]
    loop = _numbers_of_loop(counts, [row for rows in units for row in rows])
    return [
        list(_readings(column, of_term, loop, counts, factors, len(columns)))
        for column, of_term in zip(columns, units, strict=True)
    ]


_NOT_READ = {
    "curved": "it is a function of a mean over its samples ({})",
    "picked": "it picks among its samples ({})",
    "unknown": "its graph ends in {}, which is not understood",
}


def _readings(
    terms: Sequence[LossTerm],
    units_of_term: Sequence[Sequence[float]],
    loop: Collection[float],
    counts: Counts,
    factors: Sequence[float],
    columns: int,
) -> Iterator[Reading]:
    """Yield the ways to read one term over the micro-batches, the likeliest first."""
    is_mean = terms[0].kind == "mean"
    sign = math.copysign(1.0, terms[0].weight)
    measured = [sign * term.weight * by for term, by in zip(terms, factors, strict=True)]
    constants = in_all([term.scales for term in terms])
    ways = list(_own(constants, loop, counts, columns))
    for units in units_of_term:
        weights = measured if is_mean else [w * u for w, u in zip(measured, units, strict=True)]
        for own, divisor in ways:
            own_weights = tuple(weight / own for weight in weights)
            yield Reading(own_weights, tuple(units), own, divisor, is_mean and terms[0].is_loss)


def _units(terms: Sequence[LossTerm]) -> list[list[float]]:
    """Return what the units may be; of a sum: elements, their weights, or rows.

    What each sum is divided by is the likeliest: those are its units, and it is a mean.
    """
    rows = [[term.count for term in terms]]
    if terms[0].kind == "mean":
        return rows
    if all(term.weighed for term in terms):
        rows.append([term.weighed or 0.0 for term in terms])
        if all(term.is_loss for term in terms):  # class weights: torch's mean is over them
            return rows[1:]
    # Of torch's losses of labels, and of sums over them, the labels that count are known.
    is_of_labels = terms[0].is_loss and terms[0].node.startswith(("NllLoss", "SumBackward"))
    if not is_of_labels and all(len(term.sizes) > 1 for term in terms):
        rows.append([float(term.sizes[0]) for term in terms])

    def divides(units: Sequence[float]) -> bool:
        pairs = list(zip(terms, units, strict=True))
        return all(any(_divides(s, {u, max(u, 1.0)}) for s in t.scales) for t, u in pairs if u > 1)

    return sorted(rows, key=divides, reverse=True)


def _numbers_of_loop(counts: Counts, units: Sequence[Sequence[float]]) -> set[float]:
    """Return what a loop counts: micro-batches, ranks, and units of a window or a micro-batch."""
    steps = {float(n) for n in (counts.micro_batches, counts.usual, counts.first)}
    each = {row[0] for row in units if all(close(unit, row[0]) for unit in row)}
    of_rank = steps | {sum(row) / counts.ranks for row in units}
    return each | of_rank | {n * counts.ranks for n in of_rank} | {float(counts.ranks)}


def _own(
    constants: Sequence[Scale], loop: Collection[float], counts: Counts, columns: int
) -> Iterator[tuple[float, int]]:
    """Yield what may be the loss's own part of its weight, each with a divisor of the loop's."""
    divisors = [s for s in constants if _is_divisor(s, counts) and not close(s.by, columns)]
    divisors = [s for s in divisors if not _divides(s, loop)]
    divisor = round(divisors[0].by) if divisors else 0
    may_be_own = [
        scale
        for scale in constants
        if not is_loss_scale(scale.by)
        and (scale.operation == "multiplied" or not _divides(scale, loop) or scale.by == columns)
    ][:_MOST_FACTORS]
    likely = [s for s in may_be_own if s not in divisors and not _is_one_of(s.by, loop)]
    yield product(likely), divisor
    if counts.micro_batches == 1:  # nothing else tells a divisor from the loss's own
        may_be_own = [s for s in may_be_own if s not in divisors]
    for size in range(len(may_be_own), -1, -1):
        for factors in combinations(may_be_own, size):
            yield product(factors), divisor if not set(divisors) & set(factors) else 0


def _is_divisor(scale: Scale, counts: Counts) -> bool:
    """True for a whole number that a loop may take for its micro-batches."""
    by = scale.by
    is_whole = by > 2.5 and close(by, round(by))
    return scale.operation == "divided" and is_whole and by <= 2 * max(counts.micro_batches, 4)


def _is_one_of(value: float, numbers: Collection[float]) -> bool:
    """True for one of these numbers, or one divided by it; for 1 of none."""
    every = [n for number in numbers if number for n in (number, 1 / number)]
    return not close(value, 1) and any(close(value, number) for number in every)


def _divides(scale: Scale, numbers: Collection[float]) -> bool:
    by = scale.by if scale.operation == "divided" else 1 / (scale.by or math.inf)
    return any(close(by, number) for number in numbers if number > 1)


def in_all(lists: Sequence[Sequence[Scale]]) -> list[Scale]:
    """Return the factors that all lists have."""
    shared: list[Scale] = []
    rest = [list(scales) for scales in lists[1:]]
    for scale in lists[0]:
        same = [[s for s in row if _are_same(s, scale)][:1] for row in rest]
        if scale.by != 1 and all(same):
            shared.append(scale)
            for row, (other,) in zip(rest, same, strict=True):
                row.remove(other)
    return shared


def _are_same(scale: Scale, other: Scale) -> bool:
    return scale.operation == other.operation and close(scale.by, other.by)
