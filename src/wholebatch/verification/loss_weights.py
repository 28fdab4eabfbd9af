"""The weights of the micro-batches of a live loop, read from the graphs of their losses.

A loop brings every micro-batch as `weight × mean over its units`, whatever it has written: a mean
divided by the steps, a sum over the units of the window, a mean times its share. The graph of the
loss tells both numbers. Right is `weight = units / units of the window`, for every term of a loss.

    loss = F.mse_loss(out, y) * 0.5 / 4      term: weight 0.5 of its own, 1/4 of the accumulation
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from wholebatch.coupled.loss_graph import LossTerm, close

_MOST_DIVISORS = 4

OverRanks = Callable[[list[float]], list[float]]


@dataclass(frozen=True)
class TermWeights:
    """One term of the loss: in each micro-batch its weight and units, and its weight in the loss.

    `scale` is the part of the weight that is the loss's own, such as 0.5 of `0.5 * mse`.
    """

    weights: tuple[float, ...]
    units: tuple[float, ...]
    scale: float
    nominal: int
    """The number of micro-batches that the loop divides by, where that can be read."""
    choice: int | None = None
    """Which of the numbers that a sum may be over are its units."""

    def scaled_as(self, scale: float) -> TermWeights:
        """Return the weights of a loss whose own weight is known to be `scale`."""
        factor = self.scale / scale
        return replace(self, weights=tuple(w * factor for w in self.weights), scale=scale)

    def shares(self) -> list[float]:
        """Return the right weights: the units of each over those of the window."""
        return [unit / sum(self.units) for unit in self.units]


@dataclass(frozen=True)
class Unreadable:
    """The reason why the weights cannot be read; `coupled` if it is that the samples are."""

    reason: str
    coupled: bool = False


def read_weights(
    losses: Sequence[Sequence[LossTerm]],
    *,
    loss_scale: float = 1.0,
    ranks: int = 1,
    over_ranks: OverRanks | None = None,
    labels: Sequence[tuple[list[float], list[float]]] = (),
    samples: int = 0,
    counts: Sequence[float] = (),
    like: Sequence[TermWeights] = (),
) -> list[TermWeights] | Unreadable:
    """Return the weights of every term; `losses` are the terms of each micro-batch's loss.

    `over_ranks` adds numbers of this rank's window to those of the others. `labels` are numbers of
    all labels of each micro-batch, and of those that count; `samples` are all samples of the
    window. `counts` are other numbers that were counted in it, such as positives. `like` are the
    terms of another window of the same loop.
    """
    rows = [
        [term for term in terms if term.kind not in ("joined", "regulariser", "zero")]
        for terms in losses
    ]
    for term in (term for row in rows for term in row):
        if term.kind == "nonlinear":
            return Unreadable(f"it is a curve of a mean over its samples ({term.node})", True)
        if term.kind == "picked":
            return Unreadable(f"it picks among its samples ({term.node})", True)
        if term.kind == "unknown":
            return Unreadable(f"its graph ends in {term.node}, which is not understood")
    for column in zip(*rows, strict=False):
        prints = [term.weighed for term in column if term.kind == "first"]
        if len({weights or 0.0 for weights in prints}) > 1:
            reason = "it multiplies a mean over its samples by numbers of the same batch"
            return Unreadable(f"{reason} ({column[0].node})", True)
    if not rows or not rows[0]:
        return Unreadable("its graph has no mean and no sum over samples")
    rows = _means_of_samples(_with_weights(rows))
    if not _made_alike(rows) or _is_mean_of_samples(rows):
        rows = [_added(row) for row in rows]
    if not _made_alike(rows):
        return Unreadable("the micro-batches' losses are made in different ways")
    columns = [list(column) for column in zip(*rows, strict=True)]
    known = [[t.count for t in column] for column in columns if column[0].kind == "mean"]
    more = (columns, loss_scale, ranks, labels, samples, counts)
    choices = [term.choice for term in like] if len(like) == len(columns) else [None] * len(columns)
    pairs = zip(columns, choices, strict=True)
    made = [_Column(column, known, *more, choice=choice) for column, choice in pairs]
    if over_ranks is not None:
        sums = [total for one in made for total in one.totals()]
        everywhere = list(zip(sums, over_ranks(sums), strict=True))
        for one in made:
            one.everywhere = everywhere
    read = [one.read() for one in made]
    if len(like) == len(read):
        read = [term.scaled_as(other.scale) for term, other in zip(read, like, strict=True)]
    return _together(read)


def _made_alike(rows: Sequence[Sequence[LossTerm]]) -> bool:
    kinds = [[(term.node, term.kind) for term in row] for row in rows]
    return all(kind == kinds[0] for kind in kinds)


def _with_weights(rows: list[list[LossTerm]]) -> list[list[LossTerm]]:
    """Take a weight that all units of a micro-batch have as theirs, if it differs in the others."""
    by_place = len({len(row) for row in rows}) == 1
    found: dict[tuple[int, str], set[float | None]] = {}
    for place, term in ((i * by_place, t) for row in rows for i, t in enumerate(row)):
        if term.equal is not None or term.weighed is not None:
            found.setdefault((place, term.node), set()).add(term.equal)

    def apart(place: int, term: LossTerm) -> LossTerm:
        if term.equal is None or len(found[place * by_place, term.node]) == 1:
            return term
        times = tuple(factor for factor in term.times if factor != term.equal)
        return replace(term, times=times, weighed=term.equal * term.count)

    return [[apart(place, term) for place, term in enumerate(row)] for row in rows]


def _means_of_samples(rows: list[list[LossTerm]]) -> list[list[LossTerm]]:
    """Return sums as means if each is divided by a number of its own: a detector's images."""
    kinds = {(t.node, t.kind, t.times, t.seed, len(t.over)) for row in rows for t in row}
    if len(kinds) > 1 or rows[0][0].kind != "sum":
        return rows
    overs = [list(zip(*(term.over for term in row), strict=True)) for row in rows]
    own = {place for row in overs for place, one in enumerate(row) if not _same(one)}
    if len(own) != 1:
        return rows
    (place,) = own
    if all(_same([t.over[place] for t in column]) for column in zip(*rows, strict=False)):
        return rows  # the units of the window, of several terms

    def mean(term: LossTerm) -> LossTerm:
        over = term.over[:place] + term.over[place + 1 :]
        return replace(term, kind="mean", over=over, count=term.over[place])

    return [[mean(term) for term in row] for row in rows]


def _alike(row: Sequence[LossTerm]) -> list[list[LossTerm]]:
    """Return the terms by how they are made: a loss per image, or per step of time."""
    alike: dict[object, list[LossTerm]] = {}
    for term in row:
        alike.setdefault((term.node, term.kind, term.times, term.over, term.seed), []).append(term)
    return list(alike.values())


def _added(row: Sequence[LossTerm]) -> list[LossTerm]:
    """Return one sum of the terms that are made alike."""
    return [
        replace(one, kind="sum", count=float(len(same)), counted=None, sizes=())
        if one.kind == "mean"
        else replace(
            one, count=sum(t.count for t in same), weighed=_weights_of(same), sizes=(len(same),)
        )
        for same in _alike(row)
        for one in same[:1]
    ]


def _is_mean_of_samples(rows: Sequence[Sequence[LossTerm]]) -> bool:
    """True if each loss is the mean of a mean per sample: of clouds that differ in their points."""
    groups, steps = [same for row in rows for same in _alike(row)], len(rows)
    size, over = len(groups[0]), groups[0][0].over
    if size < 2 or any(len(same) != size or same[0].kind != "mean" for same in groups):
        return False
    if _same([term.count for row in rows for term in row]):
        return False  # equal: it does not matter
    is_divided = any(close(divisor, n) for divisor in over for n in (size, size * steps))
    return is_divided and (len(over) > 1 or size != steps)


def _weights_of(terms: Sequence[LossTerm]) -> float | None:
    return sum(t.weighed or 0.0 for t in terms) if all(t.weighed for t in terms) else None


def _together(read: list[TermWeights]) -> list[TermWeights]:
    """Return one term of those whose weights change with the micro-batch, but not their sum: mixup.

    `lam * loss(out, a) + (1 - lam) * loss(out, b)`
    """
    units = read[0].units
    steady = [all(close(w, term.weights[0]) for w in term.weights) for term in read]
    steady += [
        _match(term.weights, [w * sum(term.weights) for w in term.shares()]) for term in read
    ]
    if any(steady) or any(term.units != units or term.scale != 1.0 for term in read):
        return read
    weights = tuple(map(sum, zip(*(term.weights for term in read), strict=True)))
    per_unit = [w / u for w, u in zip(weights, units, strict=True) if u]
    return [replace(read[0], weights=weights)] if _same(per_unit) else read


@dataclass
class _Column:
    """One term in all micro-batches of a window."""

    terms: Sequence[LossTerm]
    known: Sequence[Sequence[float]]  # units of other terms
    columns: Sequence[Sequence[LossTerm]]  # all terms, this one too
    loss_scale: float
    ranks: int
    labels: Sequence[tuple[list[float], list[float]]]
    samples: int
    counts: Sequence[float]
    choice: int | None = None
    everywhere: Sequence[tuple[float, float]] = ()
    """Numbers of units in this rank's window, each with that of all ranks."""

    def __post_init__(self) -> None:
        self.times = _by_place([term.times for term in self.terms])
        self.over = _by_place([term.over for term in self.terms])
        self.over = [over for over in self.over if not _match(over, [1.0] * len(over))]
        for times in [one for one in self.times if self._is_of_all_terms(one)]:
            # and divided by it again
            if (over := next((o for o in self.over if _match(o, times)), None)) is not None:
                self.times.remove(times)
                self.over.remove(over)

    def totals(self) -> list[float]:
        """Return the numbers of units in this window that the loop may divide by."""
        is_sum = self.terms[0].kind == "sum"
        return list(map(sum, self._candidates(self._counts()) if is_sum else [self._counts()]))

    def read(self) -> TermWeights:
        """Return the weights and units of this term."""
        units, base = self._units()
        self.units = units
        own, nominal = self._of_the_loss()
        weights = [
            first * term.seed * math.prod(term.times) / math.prod(term.over)
            for first, term in zip(base, self.terms, strict=True)
        ]
        if self.dropped is not None:  # the division that made a mean of the sum
            weights = [weight * over for weight, over in zip(weights, self.dropped, strict=True)]
        for times in self.times:  # 0.5 * loss, where 1 / steps is 0.5 too
            total = sum(weights) / own / self.loss_scale
            # A third or less of the whole loss is the steps, as a divisor would be.
            often = [sum(close(f, times[0]) for f in column[0].times) for column in self.columns]
            more = sum(close(f, times[0]) for f in self.terms[0].times) > min(often)
            is_own = times[0] < 1 and (times[0] > 1 / 3 or more)
            if _same(times) and is_own and close(total, times[0]) and len(units) > 1:
                own *= times[0]
                break
        made = tuple(w / own for w in weights)
        return TermWeights(made, tuple(units), own, nominal, self.choice)

    def _is_of_all_terms(self, times: Sequence[float]) -> bool:
        """True for a constant factor of the whole loss; a distillation's T² is one of its term."""
        others = [column[0].times for column in self.columns]
        has_it = all(any(close(times[0], one) for one in other) for other in others)
        return _same(times) and has_it and not self.terms[0].node.startswith("KlDiv")

    def _of_the_loss(self) -> tuple[float, int]:
        """Return the weight that is the loss's own, and the steps that the loop divides by."""
        count = len(self.terms)
        own, nominal = 1.0, count
        for times in self.times:
            is_units = _same(self.units) and close(times[0], self.units[0])
            is_own = times[0] > 1 and not self._is_of_all_terms(times)
            is_own |= not is_units and not self._is_of_the_window(times[0])
            if _same(times) and is_own:
                own *= times[0]
        constant, columns = [over[0] for over in self.over if _same(over)], len(self.columns)
        divisor, is_sum = math.prod(constant), self.terms[0].kind == "sum"
        is_known = is_sum and self._is_total(divisor, sum(self.units))
        is_known |= is_sum and self._counts_more(divisor)
        if columns > 1 and (len(constant) > 1 or columns != count) and not is_known:
            alike = [column for column in self.columns if _made_alike([column[:1], self.terms[:1]])]
            sizes = (columns, len(alike)) if self.terms[0].kind == "mean" else (columns,)
            for size in sizes:  # the mean of several losses
                numbers = (size, size * count)
                one = next((c for c in constant for n in numbers if close(c, n)), 0.0)
                rest = list(constant)
                if one:
                    rest.remove(one)
                is_steps = close(one, count) and rest and not any(map(self._is_of_the_window, rest))
                if one and size > 1 and not is_steps:
                    constant = rest
                    own /= size
                    break
        if is_sum:
            divisor = math.prod(constant)
            return (own * sum(self.units) / divisor if self._counts_more(divisor) else own), nominal
        for over in constant:
            is_units = _same(self.units) and close(over, self.units[0])
            if count > 1 and (is_units or self._is_of_the_window(over)):
                continue
            if over >= 3 and _is_whole(over):
                nominal = round(over)
            else:
                own /= over
        return own, nominal

    def _counts(self) -> list[float]:
        return [float(t.count if t.counted is None else t.counted) for t in self.terms]

    def _units(self) -> tuple[list[float], list[float]]:
        """Return the units of each micro-batch, and the weight of their mean before any factor."""
        terms, counts = self.terms, self._counts()
        self.dropped: list[float] | None = None
        if terms[0].kind != "sum":
            return counts, [c / (t.count or 1.0) for c, t in zip(counts, terms, strict=True)]
        self.units = counts
        constant = [over[0] for over in self.over if _same(over)][:_MOST_DIVISORS]
        candidates = list(self._candidates(counts))
        if self.choice is not None and self.choice < len(candidates):  # as in another window
            return (candidates[self.choice],) * 2
        if self._counts_more(math.prod(constant)):
            return counts, counts
        varying = [over for over in self.over if not _same(over)]
        if not varying and (units := self._divided_by(candidates, [math.prod(constant)])):
            return units, units
        for is_sure, overs in ((True, varying), (False, self.over)):  # 4 is often the steps, too
            for units in self._candidates(counts, is_sure=is_sure):
                for over, steps in product(overs, (1, len(units))):
                    if _match(over, [unit * steps for unit in units]):
                        self.dropped = units  # divided by its own units: a mean
                        return units, [1.0] * len(units)
        several = [combinations(constant, n + 1) for n in range(len(constant))]
        divisors = [math.prod(some) for one in several for some in one]
        units = self._divided_by(candidates, divisors) or candidates[0]
        return units, units

    def _divided_by(
        self, candidates: list[list[float]], divisors: Sequence[float]
    ) -> list[float] | None:
        """Return the units whose number in the window is one of these divisors."""
        for choice, units in enumerate(candidates):
            if any(self._is_total(divisor, sum(units)) for divisor in divisors):
                self.choice = choice
                return units
        return None

    def _candidates(self, counts: list[float], is_sure: bool = False) -> Iterator[list[float]]:
        counted = [valid for full, valid in self.labels if full == counts != valid]
        if counted:  # one loss for every label, also for those that are ignored
            yield from counted
            return
        yield counts
        alike = [column for column in self.columns if _made_alike([column[:1], self.terms[:1]])]
        one = self.terms[0]
        same = [c for c in alike if (c[0].times, not c[0].weighed) == (one.times, not one.weighed)]
        for group in (same, alike) if len(same) < len(alike) else (alike,):  # a loss per image
            rows = list(zip(*group, strict=True))
            yield [sum(term.count for term in row) for row in rows]
        for weighed in ([_weights_of([t]) for t in self.terms], [_weights_of(row) for row in rows]):
            if all(weighed):
                yield [one or 0.0 for one in weighed]
        if len(alike) > 1 or len(self.terms[0].sizes) == 1:  # images, whatever they hold
            yield [float(len(row) if len(alike) > 1 else row[0].sizes[0]) for row in rows]
        if self._is_of_labels or is_sure:
            return  # those that are not ignored
        yield from ([float(c) for c in other] for other in self.known)
        if all(term.sizes for row in rows for term in row):
            yield [float(term.sizes[0]) for term in self.terms]
            yield [float(sum(term.sizes[0] for term in row)) for row in rows]
        yield from (list(over) for over in self.over if not _same(over))

    @property
    def _is_of_labels(self) -> bool:
        return self.terms[0].is_loss and self.terms[0].node.startswith(("NllLoss", "SumBackward"))

    def _is_total(self, value: float, total: float) -> bool:
        everywhere = [all_ for own, all_ in self.everywhere if own == total]
        totals = (total, *everywhere, *(all_ / self.ranks for all_ in everywhere))
        return any(close(value, one) for one in totals)

    def _counts_more(self, divisor: float) -> bool:
        """True if a sum is divided by labels before a shift, or by the samples' longest length.

        Or, if its units are not labels, by what is counted in its targets: a detector's positives.
        """
        totals = [sum(valid) for _, valid in self.labels] + [sum(self.units) + self.samples]
        if not self._is_of_labels and not close(divisor, len(self.terms)):
            most = sum(term.count for column in self.columns for term in column)
            totals += [one for one in self.counts if 1 < one < most]
        if any(close(divisor, total) for total in totals):
            return not self._is_total(divisor, sum(self.units))
        rows = [t.sizes for t in self.terms if len(t.sizes) == 2 and not t.is_loss]
        masked = any(term.count < math.prod(term.sizes) for term in self.terms)
        longest = max((sizes[1] for sizes in rows), default=0) if masked else 0
        length = divisor / self.samples if self.samples and longest else 0.0
        return length >= longest > 0 and _is_whole(length)

    def _is_of_the_window(self, value: float) -> bool:
        """True if a constant factor or divisor is the loop's: steps, ranks, units, loss scale."""
        count = len(self.terms)
        numbers = {count, self.ranks, count * self.ranks, count * count, self.loss_scale} - {0, 1}
        if self._is_total(value, sum(self.units)) or self._is_total(1 / value, sum(self.units)):
            return True
        return any(close(value, n) or close(value, 1 / n) for n in numbers)


def _by_place(factors: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return each factor over the micro-batches: those that all have, then the others by place."""
    rest = [list(one) for one in factors]
    found = []
    for value in factors[0]:
        places = [next((v for v in one if close(v, value)), None) for one in rest]
        if all(place is not None for place in places):
            found.append((value,) * len(rest))
            for one, place in zip(rest, places, strict=True):
                one.remove(place)  # type: ignore[arg-type]
    if len({len(one) for one in rest}) > 1:  # a factor of 1 is not in the graph
        return [*found, tuple(math.prod(one) for one in rest)]
    return [*found, *zip(*rest, strict=True)]


def _same(values: Sequence[float]) -> bool:
    return all(close(value, values[0]) for value in values)


def _match(values: Sequence[float], others: Sequence[float]) -> bool:
    return all(close(a, b) for a, b in zip(values, others, strict=True))


def _is_whole(value: float) -> bool:
    return close(value, round(value))
