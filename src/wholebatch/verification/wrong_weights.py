"""Explain the weights of a window's micro-batches: which mistake gives them.

Each function yields the weights that its mistake gives, in the variants that occur in public code;
`explain` compares them with those of the window. The window's own numbers come first (its steps,
the usual count, the ranks), loss scales last. All that match are found.

To add a mistake: a row in mistakes.md, a function here, and a loop in tests/verification/loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from wholebatch.verification.evidence import Counts
from wholebatch.verification.mistakes import Finding
from wholebatch.verification.weights import Rows, Shape, Weights

_Weigh = Callable[[Sequence[float], float], Sequence[float]]
"""The weights that one rank gives its micro-batches, of their units and the total of these."""
_Variants = Iterator[tuple[str, _Weigh]]


def explain(weights: Weights, counts: Counts) -> list[Finding]:
    """Return all mistakes that give these weights, the window's own numbers first."""
    for reading in weights.readings():
        divisor = max(one.divisor for readings in reading.terms for one in readings)
        own = replace(counts, divisor=divisor)
        units = reading.rows(reading.units)
        found = [_explained(key, variants, reading, units, own) for key, variants in WEIGHED]
        if any(found):
            return [one for one in found if one is not None]
    return []


def _explained(
    key: str,
    variants: Callable[[Rows, Counts], Iterator[tuple[str, Shape]]],
    weights: Weights,
    units: Rows,
    counts: Counts,
) -> Finding | None:
    """Return the first variant of a mistake that gives these weights; not if it is right here."""
    for words, shape in variants(units, counts):
        is_right = weights.is_always_right(shape)
        if not is_right and weights.are(shape, in_all_terms=key in _CONSTANT):
            return Finding(key, words)
    return None


# ------------------------------------------------------------------- the weights of micro-batches


def on_each_rank(
    variants: Callable[[Counts], _Variants],
) -> Callable[[Rows, Counts], Iterator[tuple[str, Shape]]]:
    """Return the shapes of a mistake that every rank makes on its own.

    Of several ranks, each may take shares of its own units, or of those of all.
    """

    def shapes(units: Rows, counts: Counts) -> Iterator[tuple[str, Shape]]:
        for words, weigh in variants(counts):
            yield words, partial(_each, weigh, lambda rows: [sum(row) or 1.0 for row in rows])
            if len(units) > 1:
                mean = partial(_each, weigh, lambda rows: [_mean_total(rows)] * len(rows))
                yield words, mean

    return shapes


def _each(weigh: _Weigh, totals: Callable[[Rows], Sequence[float]], units: Rows) -> Rows:
    rows = [weigh(row, total) for row, total in zip(units, totals(units), strict=True)]
    return [[weight / len(units) for weight in row] for row in rows]


def _mean_total(units: Rows) -> float:
    return sum(chain(*units)) / len(units) or 1.0


def shares_of_all(units: Rows, times: float = 1.0) -> Rows:
    """Return `times` the shares of all units, which are right if it is 1."""
    return [_shares(row, _mean_total(units) * len(units), times) for row in units]


def _even(row: Sequence[float], by: float = 1.0) -> list[float]:
    return [1.0 / by] * len(row)


def _shares(row: Sequence[float], total: float, times: float = 1.0) -> list[float]:
    return [times * unit / total for unit in row]


def _not_divided(counts: Counts) -> _Variants:
    yield "mean losses added", lambda row, total: _even(row)
    yield "sums added", lambda row, total: row
    times = f"the mean, times {counts.micro_batches}"
    yield times, lambda row, total: _shares(row, total, len(row))


def _stepped_every(counts: Counts) -> _Variants:
    by = counts.divisor
    if counts.micro_batches == counts.usual == 1 and by > 2:
        yield f"the loss is divided by {by}", lambda row, total: _even(row, by)


def _first_window(counts: Counts) -> _Variants:
    if counts.number == 1 and counts.micro_batches == 1 < counts.usual:
        words = f"the first window has 1 micro-batch, others {counts.usual}"
        yield words, lambda row, total: _even(row, counts.usual)


def _nominal_count(counts: Counts) -> _Variants:
    count = counts.micro_batches
    for by in counts.nominals:
        if by != count:
            yield f"mean losses divided by {by}", partial(_evenly, by)
            yield f"the mean, times {count}/{by}", partial(_times_count_over, by)


def _evenly(by: float, row: Sequence[float], total: float) -> list[float]:
    return _even(row, by)


def _times_count_over(by: float, row: Sequence[float], total: float) -> list[float]:
    return _shares(row, total, len(row) / by)


def _mean_of_means(counts: Counts) -> _Variants:
    words = "mean losses divided by the number of micro-batches"
    yield words, lambda row, total: _even(row, len(row))
    yield (
        "each rank's own mean, averaged over the ranks",
        lambda row, _: _shares(row, sum(row) or 1),
    )


def _divided_twice(counts: Counts) -> _Variants:
    count = counts.micro_batches
    for by in counts.nominals:
        for one, other in ((count, count), (count, by), (by, by)):
            yield f"mean losses divided by {one}·{other}", partial(_evenly, one * other)
        for times in (count, by):
            words = f"the mean divided by {times}"
            yield words, partial(lambda by, row, total: _shares(row, total, 1 / by), times)
    words = f"by {count} after every backward, with all gradients so far"
    yield words, lambda row, _: [len(row) ** -float(len(row) - i) for i in range(len(row))]


def _only(place: int, counts: Counts) -> _Variants:
    def alone(weight: Callable[[float, float], float]) -> _Weigh:
        def weigh(row: Sequence[float], total: float) -> list[float]:
            kept = place % len(row)
            return [weight(row[kept], total) * (i == kept) for i in range(len(row))]

        return weigh

    if counts.micro_batches > 1:
        yield "its mean", alone(lambda size, total: 1.0)
        yield "its sum", alone(lambda size, total: size)
        yield "its share of the units", alone(lambda size, total: size / total)
        for by in (counts.micro_batches, *counts.nominals):
            yield f"its mean / {by}", alone(partial(lambda by, size, total: 1 / by, by))


def _changed(sign: int, counts: Counts) -> _Variants:
    """Yield the weights of a window without its last or first micro-batch, or with it twice."""

    def with_change(place: int, by_units: bool, of_all: bool) -> _Weigh:
        def weigh(row: Sequence[float], total: float) -> list[float]:
            made = _shares(row, total) if by_units else _even(row, len(row))
            made[place] += sign * made[place]
            return made if of_all else _even_out(made)

        return weigh

    rest = "others'" if sign < 0 else "all and its own"
    for which, place in (("last", -1), ("first", 0)) if counts.micro_batches > 1 else ():
        for over, by_units in (("units", True), ("means", False)):
            yield f"the {which}, over all {over}", with_change(place, by_units, True)
            yield f"the {which}, over the {rest} {over}", with_change(place, by_units, False)


def _even_out(weights: Sequence[float]) -> list[float]:
    return [weight / (sum(weights) or 1.0) for weight in weights]


def _counted_twice(counts: Counts) -> _Variants:
    yield from _changed(1, counts)
    words = "the {} so far, added again with every backward"
    yield words.format("sums"), lambda row, total: _so_far(_shares(row, total))
    yield words.format("means"), lambda row, total: _so_far(_even(row, len(row)))


def _so_far(weights: Sequence[float]) -> list[float]:
    return [weight * (len(weights) - place) for place, weight in enumerate(weights)]


def _of_ranks(units: Rows, counts: Counts) -> Iterator[tuple[str, Shape]]:
    """Yield the weights of ranks whose gradients are added, and not averaged."""
    if len(units) > 1:
        yield "means of the ranks, summed", lambda rows: [_even(row, len(row)) for row in rows]
        own = "means over units, summed"
        yield own, lambda rows: [_shares(row, sum(row) or 1.0) for row in rows]
        yield "the mean, times the ranks", lambda rows: shares_of_all(rows, len(rows))


def _divided_by_ranks(units: Rows, counts: Counts) -> Iterator[tuple[str, Shape]]:
    if len(units) > 1:
        more = f"divided by {len(units)} a second time"
        yield f"the mean, {more}", lambda rows: shares_of_all(rows, 1 / len(rows))
        yield (
            f"mean losses, {more}",
            lambda rows: [_even(row, len(row) * len(rows) ** 2) for row in rows],
        )


def _other_units(units: Rows, counts: Counts) -> Iterator[tuple[str, Shape]]:
    if len(set(chain(*units))) > 1:
        yield (
            "mean losses divided by their own units a second time",
            lambda rows: [[1 / u / len(rows) if u else 0.0 for u in row] for row in rows],
        )
    for name, counted in counts.others.items():
        weighed = partial(_weighed_by, counted, counted)
        yield f"mean losses weighed by {name}", weighed
        yield f"sums divided by {name}", partial(_divided_by, counted)


def _weighed_by(counted: Rows, weights: Rows, units: Rows) -> Rows:
    ranks = len(weights)
    pairs = zip(weights, counted, strict=True)
    return [_shares(row, sum(by) or 1.0, 1 / ranks) for row, by in pairs]


def _divided_by(counted: Rows, units: Rows) -> Rows:
    return _weighed_by(counted, units, units)


def _loss_scale(units: Rows, counts: Counts) -> Iterator[tuple[str, Shape]]:
    for power in range(6, 25):
        if 1 << power in (counts.micro_batches, counts.usual, counts.first):
            continue  # the window's own number: not divided
        yield f"{1 << power} times too large", partial(_scaled, float(1 << power))


def _scaled(scale: float, units: Rows) -> Rows:
    return shares_of_all(units, scale)


_CONSTANT = ("not-divided", "divided-twice", "loss-scale", "nominal-count")
"""Mistakes by a constant factor, which all terms of a loss have."""
WEIGHED: tuple[tuple[str, Callable[[Rows, Counts], Iterator[tuple[str, Shape]]]], ...] = (
    ("stepped-every-micro-batch", on_each_rank(_stepped_every)),
    ("only-the-first", on_each_rank(_first_window)),
    ("not-divided", on_each_rank(_not_divided)),
    ("nominal-count", on_each_rank(_nominal_count)),
    ("mean-of-means", on_each_rank(_mean_of_means)),
    ("ranks-added", _of_ranks),
    ("world-size-forgotten", _divided_by_ranks),
    ("divided-twice", on_each_rank(_divided_twice)),
    ("only-the-last", on_each_rank(partial(_only, -1))),
    ("only-the-first", on_each_rank(partial(_only, 0))),
    ("left-out", on_each_rank(partial(_changed, -1))),
    ("counted-twice", on_each_rank(_counted_twice)),
    ("other-units", _other_units),
    ("loss-scale", _loss_scale),
)
"""The mistakes in the weights, in the order in which they are reported."""
