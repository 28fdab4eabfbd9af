"""The weight and the units of every micro-batch's loss, read from its terms.

Every loop adds `weight × mean over its units` of each micro-batch, however it is written: a mean
divided by the steps, a sum divided by the units of the window, a mean times its share. Right is
`weight = units / units of the window`, for every term of a loss.

    loss = F.mse_loss(out, y) * 0.5 / 4      weight 1/4; 0.5 is the loss's own

Plain rules decide if a number belongs to the loop or to the loss. If two answers are possible and
differ, nothing is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from wholebatch.verification.loss_terms import LossTerm, close

LOSS_SCALE = 64
"""A power of two from here on is a loss scale."""


class Unreadable(Exception):
    """The weights cannot be read; `coupled` if that is because the samples are coupled."""

    def __init__(self, reason: str, *, coupled: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.coupled = reason, coupled


@dataclass(frozen=True)
class Reading:
    """One way to read a term: the weight and the units of each micro-batch."""

    weights: tuple[float, ...]
    units: tuple[float, ...]
    own: float = 1.0
    """The part of the weight that is the loss's own, such as 0.5 of `0.5 * mse`."""

    def with_own(self, own: float) -> Reading:
        """Return the same weights, if the loss's own weight is known."""
        return Reading(tuple(w * self.own / own for w in self.weights), self.units, own)

    @property
    def constant(self) -> float | None:
        """Return c where the weights are c × their shares of the units; None of other weights."""
        total = sum(self.units)
        found = [w * total / u for w, u in zip(self.weights, self.units, strict=True) if u and w]
        is_one = bool(found) and all(math.isclose(f, found[0], rel_tol=1e-3) for f in found)
        return found[0] if is_one else None


@dataclass
class Column:
    """One term of the loss in all micro-batches of a window."""

    terms: Sequence[LossTerm]
    window: WindowNumbers
    shared_times: Sequence[float] = ()
    """Constant factors that every term of the loss has; a loop's factors are among them."""
    shared_over: Sequence[float] = ()
    nominal: int = 0
    """The whole number of 3 or more that the loss is divided by, if it is not the steps."""

    @property
    def divisor(self) -> int:
        """Return the whole number of 3 or more that the loss is divided by; else 0."""
        list(self.readings())
        return self.nominal

    def readings(self) -> Iterator[Reading]:
        """Yield the ways to read this term, the most likely first."""
        for units, base, used in self._units():
            times, over = _by_place(self.terms, "times"), _by_place(self.terms, "over")
            if used is not None:
                over.remove(used)
            over = [one for one in over if not _match(one, [1.0] * len(one))]
            is_mean = self.terms[0].kind == "mean" or used is not None
            own = self._own(times, over, units, is_mean)
            weights = [
                first * math.prod(t) / math.prod(o)
                for first, t, o in zip(base, _rows(times, base), _rows(over, base), strict=True)
            ]
            for scale in dict.fromkeys((own, 1.0)):
                yield Reading(tuple(w / scale for w in weights), tuple(units), scale)

    def _units(self) -> Iterator[tuple[list[float], list[float], tuple[float, ...] | None]]:
        """Yield units, the weight of their mean before any factor, and the divisor it has used."""
        counts = [term.count for term in self.terms]
        if self.terms[0].kind == "mean":
            yield counts, [1.0] * len(counts), None
            return
        candidates = list(self._candidates(counts))
        over = _by_place(self.terms, "over")
        for by in sorted(over, key=_same):  # a sum that is divided by its own units is a mean
            for units in candidates:
                if not _match(by, [1.0] * len(by)) and _match(by, units):
                    yield units, [1.0] * len(units), by
        for units in candidates:
            yield units, units, None

    def _candidates(self, counts: list[float]) -> Iterator[list[float]]:
        """Yield what the units of a sum may be: elements, their weights, rows, other labels."""
        yield counts
        weighed = [term.weighed for term in self.terms]
        if all(weighed):
            yield [one or 0.0 for one in weighed]
        if self.terms[0].is_loss and self.terms[0].node.startswith(("NllLoss", "SumBackward")):
            return  # labels that are not ignored
        if all(len(term.sizes) > 1 for term in self.terms):
            yield [float(term.sizes[0]) for term in self.terms]

    def _own(
        self,
        times: Sequence[tuple[float, ...]],
        over: Sequence[tuple[float, ...]],
        units: Sequence[float],
        is_mean: bool,
    ) -> float:
        """Return the product of the constant factors that are the loss's own."""
        own, columns = 1.0, self.window.columns
        shared_times, shared_over = list(self.shared_times), list(self.shared_over)
        has_steps = any(_same(one) and self.window.is_steps(one[0]) for one in over)
        for one in times:
            is_shared = _same(one) and _take(shared_times, one[0])
            is_loop = is_shared and self.window.is_of_the_loop(one[0], units)
            if _same(one) and not (is_loop or self.window.is_total(1 / one[0], units)):
                own *= one[0]
        for one in over:
            if not _same(one):
                continue
            by = one[0]
            is_shared = _take(shared_over, by)
            is_of_terms = columns > 1 and close(by, columns)
            again = sum(_same(one) and close(one[0], by) for one in over) > 1
            if is_of_terms and (columns != self.window.count or again):
                own, columns = own / by, 1
            elif self.window.is_total(by, units) or (
                is_shared and self.window.is_of_the_loop(by, units)
            ):
                continue
            elif (by < 3 or not _is_whole(by)) and is_mean:
                own /= by
            elif is_mean and is_shared and not has_steps and by <= 2 * max(self.window.count, 4):
                self.nominal = round(by)
            elif is_mean and has_steps:
                own /= by
        return own


@dataclass(frozen=True)
class WindowNumbers:
    """The numbers that a loop may multiply or divide by: steps, ranks, a loss scale."""

    count: int
    """Micro-batches of this window, on one rank."""
    usual: int
    """Micro-batches of most windows."""
    ranks: int = 1
    factor: float = 1.0
    """The factor that the loop puts on the gradients between the last backward and the step."""
    columns: int = 1

    def is_steps(self, value: float) -> bool:
        """True for the number of micro-batches, on one rank or on all."""
        counts = {self.count, self.usual, self.count * self.ranks}
        return any(close(value, one) for one in counts if one > 1)

    def is_total(self, value: float, units: Sequence[float]) -> bool:
        """True for the units of the window, on one rank or on all."""
        return any(close(value, sum(units) / over) for over in {1, self.ranks})

    def is_of_the_loop(self, value: float, units: Sequence[float]) -> bool:
        """True if a constant factor or divisor is the loop's, and not the loss's own."""
        total, ranks = sum(units), self.ranks
        numbers = {self.count, self.usual, ranks, self.count * ranks, self.count**2, self.factor}
        numbers |= {total, total / ranks}
        numbers |= {units[0]} if _same(units) else set()
        inverse = {1 / one for one in numbers if one}
        if is_loss_scale(value):
            return True
        return any(close(value, one) for one in (numbers | inverse) if not close(one, 1))


def is_loss_scale(factor: float) -> bool:
    """True for a power of two from 64 on."""
    power = math.log2(max(factor, 1e-300))
    return factor > LOSS_SCALE - 1 and abs(power - round(power)) < 1e-3


def read_columns(losses: Sequence[Sequence[LossTerm]], window: WindowNumbers) -> list[Column]:
    """Return the terms of a loss over the micro-batches; `losses` are the terms of each.

    Raises `Unreadable` where a term is not a plain mean or sum.
    """
    rows = [[t for t in terms if t.kind not in ("penalty", "zero")] for terms in losses]
    for term in (term for row in rows for term in row):
        if term.kind == "curved":
            reason = f"it is a function of a mean over its samples ({term.node})"
            raise Unreadable(reason, coupled=True)
        if term.kind == "picked":
            raise Unreadable(f"it picks among its samples ({term.node})")
        if term.kind == "unknown":
            raise Unreadable(f"its graph ends in {term.node}, which is not understood")
    if not rows or not rows[0]:
        raise Unreadable("its graph has no mean and no sum over samples")
    if not _made_alike(rows):
        raise Unreadable("the micro-batches' losses are made in different ways")
    columns = [list(column) for column in zip(*rows, strict=True)]
    window = replace(window, columns=len(columns))
    times = [_constants(column, "times") for column in columns]
    over = [_constants(column, "over") for column in columns]
    return [Column(column, window, _in_all(times), _in_all(over)) for column in columns]


def _made_alike(rows: Sequence[Sequence[LossTerm]]) -> bool:
    kinds = [[(term.node, term.kind) for term in row] for row in rows]
    return all(kind == kinds[0] for kind in kinds)


def _by_place(terms: Sequence[LossTerm], name: str) -> list[tuple[float, ...]]:
    """Return each factor over the micro-batches: those that all have, then the others by place."""
    rest = [list(getattr(term, name)) for term in terms]
    found = []
    for value in getattr(terms[0], name):
        if all(any(close(value, one) for one in row) for row in rest):
            found.append((value,) * len(rest))
            for row in rest:
                _take(row, value)
    if len({len(row) for row in rest}) > 1:  # a factor of 1 is not in the graph
        return [*found, tuple(math.prod(row) for row in rest)]
    return [*found, *zip(*rest, strict=True)]


def _rows(columns: Sequence[tuple[float, ...]], like: Sequence[float]) -> list[tuple[float, ...]]:
    return list(zip(*columns, strict=True)) if columns else [()] * len(like)


def _constants(terms: Sequence[LossTerm], name: str) -> list[float]:
    return [one[0] for one in _by_place(terms, name) if _same(one)]


def _in_all(lists: Sequence[Sequence[float]]) -> list[float]:
    """Return the numbers that all lists have."""
    rest = [list(one) for one in lists[1:]]
    return [
        value
        for value in lists[0]
        if all(any(close(value, one) for one in row) for row in rest)
        and all(_take(row, value) for row in rest)
    ]


def _take(values: list[float], value: float) -> bool:
    """Remove a value from a list; False if it is not there."""
    for place, one in enumerate(values):
        if close(one, value):
            del values[place]
            return True
    return False


def _same(values: Sequence[float]) -> bool:
    return all(close(value, values[0]) for value in values)


def _match(values: Sequence[float], others: Sequence[float]) -> bool:
    return all(close(a, b) for a, b in zip(values, others, strict=True))


def _is_whole(value: float) -> bool:
    return close(value, round(value))
