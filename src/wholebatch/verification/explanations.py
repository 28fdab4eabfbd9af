"""Explanations of a window that is not the update of the undivided batch.

`WEIGHED` explains the weights of the micro-batches. Each function yields the weights that its
mistake gives, in the variants that occur in public code; `explain` compares them with those of the
window. The window's own numbers come first (its steps, the usual count, the ranks), loss scales
last. All that match are found.

`SEEN`, `LOST` and `BESIDE` read the evidence itself: what is wrong whatever the weights, what
became of a gradient that is not in the step, and what goes wrong beside a right gradient.

To add a mistake: a row in mistakes.md, a function here, and a loop in tests/verification/loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations

import torch

from wholebatch.readable_sizes import percent
from wholebatch.verification.evidence import Counts, WindowEvidence
from wholebatch.verification.loss_factors import LOSS_SCALE, is_loss_scale
from wholebatch.verification.mistakes import MISTAKES
from wholebatch.verification.run_comparison import TIMES_THE_FLOOR, fit_of
from wholebatch.verification.weights import (
    SAME_WEIGHT,
    Rows,
    Shape,
    Weights,
    apart,
    before_clip,
    floor_of,
    parallel,
)


@dataclass(frozen=True)
class Finding:
    """A mistake that explains a window: its key in `MISTAKES`, and how it shows."""

    key: str
    variant: str
    is_beside: bool = False
    """True if it goes wrong beside the weights, which may be wrong as well."""

    @property
    def name(self) -> str:
        return MISTAKES[self.key].name


STEPPED_TWICE = Finding("two-owners", "two optimizers step on the same gradients")
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

Ranks = Sequence[WindowEvidence]
"""The evidence of one window on every rank."""


# ------------------------------------------------------------------- whatever the weights


def _repeated(ranks: Ranks) -> Finding | None:
    if any(micro.is_repeated for window in ranks for micro in window.backwards):
        return Finding("counted-twice", "two backwards of the same loss")
    return None


def _times_zero(ranks: Ranks) -> Finding | None:
    for window in ranks:
        for place, micro in enumerate(window.backwards, start=1):
            if {term.kind for term in micro.terms} == {"zero"}:
                return Finding("left-out", f"the loss of number {place} is multiplied by 0")
    return None


def _scale_changes(ranks: Ranks) -> Finding | None:
    for window in ranks:
        scales = [micro.loss_scale for micro in window.backwards]
        if len(set(scales)) > 1:
            variant = f"from {scales[0]:g} to {scales[-1]:g} in the window"
            return Finding("loss-scale", variant)
    return None


def _unsynchronised(ranks: Ranks) -> Finding | None:
    """Find ranks that clip, or step, each with a gradient of its own."""
    gradients = [window.gradient for window in ranks if window.gradient is not None]
    if len(gradients) < 2 or len(gradients) < len(ranks):
        return None
    limit = TIMES_THE_FLOOR**2 * max(window.eps for window in ranks)
    if any(apart(one, gradients[0]) > limit for one in gradients[1:]):
        return Finding("unsynchronised-ranks", "each rank steps with another gradient")
    before = [window.last_clips[-1].before for window in ranks if window.last_clips]
    if len(before) == len(ranks) and any(apart(b, before[0]) > limit for b in before[1:]):
        return Finding("clipped-too-early", "each rank's own gradient, not their mean")
    return None


def _scaled_after_clip(ranks: Ranks) -> Finding | None:
    """Find a gradient that is divided after it was clipped."""
    window = ranks[0]
    clips, gradient = [clip for clip in window.last_clips if clip.cuts], window.gradient
    if not clips or gradient is None or not parallel(gradient, clips[-1].after, 1e-4):
        return None
    factor = float(clips[-1].after.norm() / gradient.norm())
    if math.isclose(factor, 1.0, rel_tol=SAME_WEIGHT):
        return None
    scale = window.backwards[0].loss_scale if window.backwards else 1.0
    is_scale = scale != 1 and math.isclose(factor, scale, rel_tol=SAME_WEIGHT)
    is_scale |= factor > 2 * LOSS_SCALE - 1 and is_loss_scale(factor)
    key = "clipped-while-scaled" if is_scale else "clipped-too-early"
    return Finding(key, f"clipped while {factor:.4g} times as large")


SEEN = (_repeated, _times_zero, _scale_changes, _unsynchronised, _scaled_after_clip)
"""Mistakes that are seen in the evidence, whatever the weights."""


# ------------------------------------------------------------------- a gradient that is lost


def _never_cleared(ranks: Ranks) -> Finding | None:
    """Find a window that begins with gradients of the one before."""
    for window in ranks:
        first = window.backwards[0].before
        if first.any():
            flow = torch.stack([micro.contribution for micro in window.backwards]).sum(0)
            if fit_of([[flow], [first]], [before_clip(ranks[0])])[1] <= 1e-4:
                variant = "there are gradients before the first backward of the window"
                return Finding("never-cleared", variant)
    return None


def _cleared(ranks: Ranks) -> Finding | None:
    """Find gradients that are cleared between two backwards."""
    for window in ranks:
        micros, count = window.backwards, len(window.backwards)
        cleared = [
            i for i in range(1, count) if not micros[i].before.any() and micros[i - 1].after.any()
        ]
        if cleared:
            rest = torch.stack([micro.contribution for micro in micros[cleared[-1] :]]).sum(0)
            if parallel(before_clip(ranks[0]), rest, 1e-4):
                key = "only-the-last" if len(cleared) == count - 1 else "cleared-in-the-window"
                return Finding(key, f"cleared after micro-batch {', '.join(map(str, cleared))}")
    return None


def _clipped_early(ranks: Ranks) -> Finding | None:
    """Find clips before the last backward.

    A single one that has changed nothing counts in a proof, which is about other data, too.
    """
    for window in ranks:
        count = len(window.backwards)
        clips = [clip for clip in window.clips if clip.counts]
        early = {clip.number for clip in clips if 0 < clip.number < count}
        last = any(clip.number == count for clip in clips)
        is_each = len(early) > 1 or (count == 2 and last)
        does_cut = any(clip.cuts for clip in clips if clip.number < count)
        if early and (is_each or does_cut or window.known is not None):
            key = "clipped-per-micro-batch" if is_each else "clipped-too-early"
            variant = f"after micro-batch {', '.join(map(str, sorted(early)))} of {count}"
            return Finding(key, variant + ("" if does_cut else ", which clipped nothing here"))
    return None


def _same_twice(ranks: Ranks) -> Finding | None:
    """Find a micro-batch whose gradient was brought twice."""
    for window in ranks:
        for one, two in combinations(range(len(window.backwards)), 2):
            brought = [window.backwards[place].contribution for place in (one, two)]
            if apart(*brought) <= 1e-6:
                return Finding("counted-twice", f"number {one + 1} and {two + 1}")
    return None


def _in_16_bits(ranks: Ranks) -> Finding | None:
    brought = [micro.contribution for window in ranks for micro in window.backwards]
    off = apart(before_clip(ranks[0]), torch.stack(brought).sum(0) / len(ranks))
    if ranks[0].is_half and off <= math.sqrt(ranks[0].eps) * TIMES_THE_FLOOR:
        return Finding("16-bit-accumulation", f"{percent(off)} of the sum is lost")
    return None


LOST = (_never_cleared, _cleared, _clipped_early, _same_twice, _in_16_bits)
"""What becomes of gradients that are not in the step as they were brought."""


def is_lost(ranks: Ranks) -> bool:
    """True if the gradient of the step is not what all backwards brought, with one factor."""
    brought = [micro.contribution for window in ranks for micro in window.backwards]
    if not brought or any(one.gradient is None or not one.backwards for one in ranks):
        return False
    flow = torch.stack(brought).sum(0)
    tolerance = TIMES_THE_FLOOR * floor_of(brought, flow, max(one.eps for one in ranks))
    return not parallel(
        before_clip(ranks[0]), flow, ranks[0].eps if ranks[0].is_half else tolerance
    )


# ------------------------------------------------------------------- beside a right gradient


def _moved(ranks: Ranks) -> Finding | None:
    if any(micro.moved for window in ranks for micro in window.backwards[1:]):
        return Finding("moved-in-the-window", "between two backwards")
    return None


def _scheduled(ranks: Ranks) -> Finding | None:
    for window in ranks:
        rates = [micro.rates for micro in window.backwards if micro.rates]
        if len(set(rates)) > 1:
            seen = next(one for one in zip(*rates, strict=True) if len(set(one)) > 1)
            variant = f"from {seen[0]:.3g} to {seen[-1]:.3g}"
            return Finding("scheduled-per-micro-batch", variant)
        if window.ledger is not None and window.ledger.schedule_moved:
            return Finding("scheduled-per-micro-batch", "the rate changed within the window")
    return None


def _averaged(ranks: Ranks) -> Finding | None:
    if any(window.is_averaged_inside for window in ranks):
        return Finding("averaged-per-micro-batch", "AveragedModel.update_parameters")
    return None


def _coupled(ranks: Ranks) -> Finding | None:
    for window in ranks:
        micros = window.backwards
        if len(micros) > 1 and micros[0].batchnorms:
            return Finding("coupled", f"BatchNorm: {', '.join(micros[0].batchnorms[:3])}")
        curved = [t.node for m in micros for t in m.terms if t.kind == "curved"]
        if len(micros) > 1 and curved and window.known is None:
            variant = f"the loss: it is a function of a mean over its samples ({curved[0]})"
            return Finding("coupled", variant)
        if window.known is not None and window.known.is_coupled:
            return Finding("coupled", "a layer mixes samples")
    return None


def _mean_as_sum(ranks: Ranks) -> Finding | None:
    """Find totals of wholebatch's windows that are means: they are divided by their units twice."""
    for window in ranks:
        ledger = window.ledger
        if ledger is None or not ledger.terms or len(ledger.terms) != len(ledger.units):
            continue
        alone = [terms[0] for terms in ledger.terms if len(terms) == 1 and terms[0].kind == "mean"]
        if len(alone) < len(ledger.terms):
            continue
        factors = [math.prod(term.times) / math.prod(term.over) for term in alone]
        are_same = all(math.isclose(one, factors[0], rel_tol=SAME_WEIGHT) for one in factors)
        is_over_many = all(term.count > 1 for term in alone) and min(ledger.units) > 1
        if are_same and is_over_many and factors[0] < 2:
            return Finding("mean-as-sum", f"means over {alone[0].count:g} and more")
    return None


BESIDE = (_moved, _scheduled, _averaged, _coupled, _clipped_early, _mean_as_sum)
"""Mistakes beside the weights, which are reported together with them."""
