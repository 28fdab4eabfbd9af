"""Explain the weights of a window's micro-batches: which mistake gives them.

`wrong_weights` yields the weights that each mistake gives; `explain` compares them with those of
the window. All mistakes that match are found.

To add a mistake: its row in mistakes.md, its weights here, its row in tests/programs/plain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from wholebatch.verification.evidence import Counts
from wholebatch.verification.findings import Finding, micro_batches
from wholebatch.verification.weights import SAME_WEIGHT, Weights

_Rows = Sequence[Sequence[float]]
"""Numbers of micro-batches, by rank."""
_Variants = Iterator[tuple[str, str, list[float]]]
"""The key of a mistake, a variant of it in words, and the weights that it gives."""

_ORDER = (
    *("stepped-every-micro-batch", "only-the-first", "not-divided", "nominal-count"),
    *("mean-of-means", "ranks-added", "world-size-forgotten", "divided-twice", "other-units"),
    "loss-scale",
)
"""The order of reports: the window's own numbers first (steps, usual count, ranks), scales last."""
_CONSTANT = ("not-divided", "divided-twice", "loss-scale", "nominal-count")
"""Mistakes by a constant factor, which all terms of a loss have."""


def explain(weights: Weights, counts: Counts) -> list[Finding]:
    """Return all mistakes that give these weights, the likeliest first.

    A term that is wrong is read in its likeliest way.
    """
    are_wrong = [weights.best(row).off > SAME_WEIGHT for row in weights.terms]
    terms = [
        row[: 1 if is_wrong else None]
        for row, is_wrong in zip(weights.terms, are_wrong, strict=True)
    ]
    own = replace(counts, divisor=max(reading.divisor for row in terms for reading in row))
    tables = [
        [(reading, list(wrong_weights(weights.rows(reading.units), own))) for reading in row]
        for row in terms
    ]
    findings: dict[str, Finding] = {}
    for number, (key, words, _) in enumerate(tables[0][0][1]):
        fits = key not in findings and all(
            any(reading.apart(table[number][2]) <= SAME_WEIGHT for reading, table in row)
            for row, is_wrong in zip(tables, are_wrong, strict=True)
            if is_wrong or key in _CONSTANT
        )
        # Weights that are right for these units show no mistake.
        if fits and any(not _are_shares(row[0][0].units, row[0][1][number][2]) for row in tables):
            findings[key] = Finding(key, words)
    return sorted(findings.values(), key=lambda finding: _ORDER.index(finding.key))


def _are_shares(units: Sequence[float], weights: Sequence[float]) -> bool:
    total = sum(units) or 1.0
    pairs = zip(weights, units, strict=True)
    return all(math.isclose(w, u / total, rel_tol=SAME_WEIGHT) for w, u in pairs)


def wrong_weights(units: _Rows, counts: Counts) -> _Variants:
    """Yield the weights of each mistake. The variants depend on the counts alone, not the units."""
    ranks, total = len(units), sum(chain(*units)) or 1.0
    # Each rank may take shares of its own units, or of those of all.
    for totals in [[sum(row) or 1.0 for row in units], [total / ranks] * ranks][: min(ranks, 2)]:
        rows = [list(_of_one_rank(*pair, counts)) for pair in zip(units, totals, strict=True)]
        for variant in zip(*rows, strict=True):
            key, words, _ = variant[0]
            yield key, words, [weight / ranks for *_, row in variant for weight in row]
    every = list(chain(*units))

    def mean(times: float) -> list[float]:
        return [times * unit / total for unit in every]

    def means(by: float) -> list[float]:
        return [1 / (len(row) * by) for row in units for _ in row]

    if ranks > 1:
        yield "ranks-added", "means of the ranks, summed", means(1)
        yield "ranks-added", "the mean, times the ranks", mean(ranks)
        again = f"divided by {ranks} a second time"
        yield "world-size-forgotten", f"the mean, {again}", mean(1 / ranks)
        yield "world-size-forgotten", f"mean losses, {again}", means(ranks**2)
    own = "mean losses divided by their own units a second time"
    if len(set(every)) == 1:  # a constant, which other mistakes explain
        yield "other-units", own, [math.nan] * len(every)
    else:
        yield "other-units", own, [1 / u / ranks if u else 0.0 for u in every]
    for power in range(6, 25):
        scale = 1 << power
        if scale not in (counts.micro_batches, counts.usual, counts.first):  # else: not divided
            yield "loss-scale", f"{scale} times too large", mean(scale)


def _of_one_rank(row: Sequence[float], total: float, counts: Counts) -> _Variants:
    """Yield the weights that one rank gives its micro-batches, of their units and a total."""
    size, count, usual = len(row), counts.micro_batches, counts.usual
    came = f"{micro_batches(count)} came"

    def means(by: float) -> list[float]:
        return [1 / by] * size

    def mean(times: float) -> list[float]:
        return [times * unit / total for unit in row]

    nominals = counts.nominals
    if count == usual == 1 and counts.divisor > 2:
        nominals, words = [], f"the loss is divided by {counts.divisor}"
        yield "stepped-every-micro-batch", words, means(counts.divisor)
    is_first_alone = counts.number == 1 and count == 1 < usual
    if is_first_alone:
        words = f"the first window has 1 micro-batch, others {usual}"
        yield "only-the-first", words, means(usual)
    yield "not-divided", f"mean losses added, and nothing divides: {came}", means(1)
    yield "not-divided", "sums added", list(row)
    yield "not-divided", f"the mean, times {count}", mean(size)
    for by in nominals:
        if by != count and not is_first_alone:
            words = f"`/ {by}` where {came}"
            yield "nominal-count", words, means(by)
            yield "nominal-count", f"the mean, times {count}/{by}: {words}", mean(size / by)
    yield "mean-of-means", "mean losses divided by the number of micro-batches", means(size)
    own = [unit / (sum(row) or 1.0) for unit in row]
    yield "mean-of-means", "each rank's own mean, averaged over the ranks", own
    for by in nominals:
        for first, second in ((count, count), (count, by), (by, by)):
            yield "divided-twice", f"mean losses divided by {first}·{second}", means(first * second)
        for times in (count, by):
            yield "divided-twice", f"the mean divided by {times}", mean(1 / times)
