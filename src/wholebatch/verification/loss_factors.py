"""Tell the loop's part of a measured weight from the loss's own.

    loss = F.mse_loss(out, y) * 0.5 / 4      measured 0.125: 1/4 is the loop's, 0.5 the loss's own

The loop has three roles for a number: the micro-batches, the ranks, and a loss scale; of a sum, the
units, too. Each role takes one factor, and what remains is the loss's own. Where a role may take
one of several factors, all readings are given: a window that is right by one of them is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from wholebatch.verification.evidence import Counts
from wholebatch.verification.loss_ends import Scale
from wholebatch.verification.loss_terms import LossTerm, close, product

LOSS_SCALE = 64
"""A power of two from here on may be a loss scale."""


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
    """The whole number of 3 or more that the loss is divided by, if it is not the micro-batches."""
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
    micro_batches: Sequence[Sequence[LossTerm]], counts: Counts, factors: Sequence[float]
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
    constants = [in_all([term.scales for term in column]) for column in columns]
    shared = in_all(constants)
    return [
        list(_readings(column, own, shared, counts, factors, columns))
        for column, own in zip(columns, constants, strict=True)
    ]


_NOT_READ = {
    "curved": "it is a function of a mean over its samples ({})",
    "picked": "it picks among its samples ({})",
    "unknown": "its graph ends in {}, which is not understood",
}


def _readings(
    terms: Sequence[LossTerm],
    constants: Sequence[Scale],
    shared: Sequence[Scale],
    counts: Counts,
    factors: Sequence[float],
    columns: Sequence[Sequence[LossTerm]],
) -> Iterator[Reading]:
    """Yield the ways to read one term over the micro-batches, the likeliest first."""
    is_mean = terms[0].kind == "mean"
    sign = math.copysign(1.0, terms[0].weight)
    measured = [sign * term.weight * by for term, by in zip(terms, factors, strict=True)]
    of_others = [[term.count for term in column] for column in columns]
    varying = [product(term.scales) / product(constants) for term in terms]
    for units in _units(terms):
        weights = measured if is_mean else [w * u for w, u in zip(measured, units, strict=True)]
        weighs = not all(close(value, varying[0]) for value in varying)
        known = [units, *of_others, *[varying] * weighs]
        roles = _roles(counts, known, factors, len(columns))
        kept = _uncancelled(constants)
        ways = dict.fromkeys(
            way
            for rows in (constants, kept)
            for way in _own(rows, shared, roles, counts, len(columns))
        )
        for own, divisor in dict.fromkeys([*ways, (1.0, 0)]):
            own_weights = tuple(weight / own for weight in weights)
            yield Reading(own_weights, tuple(units), own, divisor, is_mean and terms[0].is_loss)


def _units(terms: Sequence[LossTerm]) -> list[list[float]]:
    """Return what the units may be; of a sum: elements, their weights, rows, other labels.

    What each sum is divided by is the likeliest: those are its units, and it is a mean.
    """
    found = [[term.count for term in terms]]
    weighed = [term.weighed for term in terms]
    if terms[0].kind == "mean":
        return found
    if all(weighed):
        found.append([weight or 0.0 for weight in weighed])
        if all(term.is_loss for term in terms):  # class weights: torch's mean is over them
            return found[1:]
    # Of torch's losses of labels, and of sums over them, the labels that count are known.
    is_of_labels = terms[0].is_loss and terms[0].node.startswith(("NllLoss", "SumBackward"))
    if not is_of_labels and all(len(term.sizes) > 1 for term in terms):
        found.append([float(term.sizes[0]) for term in terms])

    def divides(units: Sequence[float]) -> bool:
        pairs = list(zip(terms, units, strict=True))
        return all(any(_divides(s, {u, max(u, 1.0)}) for s in t.scales) for t, u in pairs if u > 1)

    return sorted(found, key=divides, reverse=True)


@dataclass(frozen=True)
class _Role:
    """A role of the loop that may take one factor."""

    fits: Callable[[Scale], bool]
    may_pass: Callable[[Scale], bool] = lambda scale: False
    """True for a factor that may be the loss's own as well, so both readings are given."""
    divides: bool = False
    """True for the units and the micro-batches."""
    is_of_one_term: bool = False
    """True if each term of the loss may have its own: units."""


def _roles(
    counts: Counts, units: Sequence[Sequence[float]], factors: Sequence[float], columns: int
) -> list[_Role]:
    """Return what a loop may multiply or divide by: its units, micro-batches, scale and ranks."""
    count, ranks = counts.micro_batches, counts.ranks
    totals = {sum(row) / over for row in units for over in (1, ranks)}
    each = {row[0] for row in units if all(close(unit, row[0]) for unit in row)}
    steps = {n * over for n in (count, counts.usual, counts.first) for over in (1, ranks)}
    after = abs(factors[0]) * ranks  # between the last backward and the step

    def is_product(scale: Scale) -> bool:
        return count > 1 and scale.operation == "multiplied"

    def is_a_weight(scale: Scale) -> bool:
        return is_product(scale) or (count > 1 and columns > 1 and close(scale.by, columns))

    return [
        _Role(lambda scale: _divides(scale, totals), is_product, divides=True, is_of_one_term=True),
        _Role(lambda scale: _is_one_of(scale.by, each), is_product, is_of_one_term=True),
        _Role(lambda scale: _is_one_of(scale.by, steps), is_a_weight, divides=True),
        _Role(lambda scale: is_loss_scale(scale.by)),
        _Role(lambda scale: _is_one_of(scale.by, {after}), is_product),
        _Role(lambda scale: _is_one_of(scale.by, {ranks}), is_product),
    ]


def _is_one_of(value: float, numbers: Collection[float]) -> bool:
    """True for one of these numbers, or one divided by it; for 1 of none."""
    every = [n for number in numbers if number for n in (number, 1 / number)]
    return not close(value, 1) and any(close(value, number) for number in every)


def _divides(scale: Scale, numbers: Collection[float]) -> bool:
    by = scale.by if scale.operation == "divided" else 1 / (scale.by or math.inf)
    return any(close(by, number) for number in numbers if number > 1)


def _own(
    constants: Sequence[Scale],
    shared: Sequence[Scale],
    roles: Sequence[_Role],
    counts: Counts,
    columns: int,
) -> Iterator[tuple[float, int]]:
    """Yield what may be the loss's own part of its weight, each with a divisor of the loop's."""
    for rest, is_divided in _rests(list(constants), list(shared), roles):
        divisors = [s for s in rest if _is_divisor(s, counts) and not close(s.by, columns)]
        divisors = [] if is_divided else divisors
        own = [s for s in rest if s not in divisors]
        yield product(own), round(divisors[0].by) if divisors else 0
        if counts.micro_batches > 1:
            yield product(rest), 0


def _is_divisor(scale: Scale, counts: Counts) -> bool:
    """True for a whole number that a loop may take for its micro-batches."""
    by = scale.by
    is_whole = by > 2.5 and close(by, round(by))
    return scale.operation == "divided" and is_whole and by <= 2 * max(counts.micro_batches, 4)


def _rests(
    constants: list[Scale], shared: list[Scale], roles: Sequence[_Role]
) -> Iterator[tuple[list[Scale], bool]]:
    """Yield the factors that no role takes, and if the units or micro-batches took one.

    A second division by the same number belongs to the loop, too: it divides twice.
    """
    if not roles:
        yield constants, False
        return
    role, among = roles[0], constants if roles[0].is_of_one_term else shared
    fitting = [s for s in constants if role.fits(s) and any(_are_same(s, other) for other in among)]
    for place, taken in enumerate(fitting):
        if any(_are_same(taken, other) for other in fitting[:place]):
            continue
        rest, others = _without(constants, taken), _without(shared, taken)
        if taken.operation == "divided":
            rest = [s for s in rest if not _are_same(s, taken)]
        for inner, is_divided in _rests(rest, others, roles[1:]):
            yield inner, is_divided or role.divides
    if all(map(role.may_pass, fitting)):
        yield from _rests(constants, shared, roles[1:])


# ------------------------------------------------------------------- factors over the micro-batches


def in_all(lists: Sequence[Sequence[Scale]]) -> list[Scale]:
    """Return the factors that all lists have."""
    found, rest = [], [list(scales) for scales in lists[1:]]
    for scale in lists[0]:
        if scale.by != 1 and all(any(_are_same(scale, s) for s in row) for row in rest):
            found.append(scale)
            rest = [_without(row, scale) for row in rest]
    return found


def _uncancelled(scales: Sequence[Scale]) -> list[Scale]:
    """Return the factors but for pairs that make 1 together: `loss / n * n`."""
    kept: list[Scale] = []
    for scale in scales:
        pair = [s for s in kept if s.operation != scale.operation and close(s.by, scale.by)]
        kept = _without(kept, pair[0]) if pair else [*kept, scale]
    return kept


def _without(scales: Sequence[Scale], one: Scale) -> list[Scale]:
    """Return the factors without one that is the same, if there is one."""
    place = next((i for i, scale in enumerate(scales) if _are_same(scale, one)), len(scales))
    return [*scales[:place], *scales[place + 1 :]]


def _are_same(one: Scale, other: Scale) -> bool:
    return one.operation == other.operation and close(one.by, other.by)
