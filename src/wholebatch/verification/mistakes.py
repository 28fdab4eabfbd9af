"""The known mistakes, and the weights that each would give the micro-batches of a window.

The right gradient is `sum of units × mean gradient / sum of units`, over the micro-batches of all
ranks. A mistake weights or divides differently. Each has the variants that occur in public code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch.samples import tensors_of
from wholebatch.verification.run_comparison import distance

RIGHT = "right"
NOT_JUDGED = "not judged"
STEPPED_TWICE = ("two-owners", "two optimizers step on the same gradients")
"""A mistake that is found without gradients: its key, and what was seen."""


@dataclass(frozen=True)
class Mistake:
    """A known mistake: its name, what it does, and what to do instead."""

    name: str
    does: str
    instead: str


def texts_in(name: str) -> dict[str, list[str]]:
    """Return the rows of a table in Markdown beside this file, by their keys."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()[4:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {key: texts for key, *texts in rows}


MISTAKES = {key: Mistake(*texts) for key, texts in texts_in("mistakes.md").items()}


@dataclass(frozen=True)
class MistakeFit:
    """The distance of the observed gradients from those of one hypothesis; 0 if it was seen."""

    key: str
    variant: str
    distance: float = 0.0
    fits: bool = True

    @property
    def name(self) -> str:
        return "right" if self.key == RIGHT else MISTAKES[self.key].name


@dataclass(frozen=True)
class Hypothesis:
    """The gradient that the optimizer's step would see with this mistake, or without any."""

    key: str
    variant: str
    gradient: Tensor


@dataclass(frozen=True)
class WindowParts:
    """One window taken apart: by rank, the mean gradient and the units of each micro-batch."""

    right: Tensor
    means: Sequence[Sequence[Tensor]]
    units: Sequence[Sequence[float]]
    nominal: int
    """The number of micro-batches that the loop calls a full window."""

    def weighted(self, weights: Sequence[Sequence[float]]) -> Tensor:
        """Return the weighted sum of the micro-batches' mean gradients."""
        pairs = zip(chain(*self.means), chain(*weights), strict=True)
        return sum((mean * weight for mean, weight in pairs), torch.zeros_like(self.right))


def nearest(
    candidates: Iterator[Hypothesis], observed: Tensor, tolerance: float
) -> list[MistakeFit]:
    """Return the best variant of every hypothesis, the nearest first; the first of all is right."""
    best: dict[str, MistakeFit] = {}
    right = None
    for one in candidates:
        right = one.gradient if right is None else right
        if one.key != RIGHT and apart(one.gradient, right) <= tolerance:
            continue  # cannot be told from the right one in this window
        far = apart(observed, one.gradient)
        if one.key not in best or far < best[one.key].distance:
            best[one.key] = MistakeFit(one.key, one.variant, far, far <= tolerance)
    return sorted(best.values(), key=lambda fit: (fit.distance, fit.key != RIGHT))


def apart(ours: Tensor, right: Tensor) -> float:
    """Return the relative distance of two rows."""
    return distance([ours], [right])


# ------------------------------------------------------------------- hypotheses


def hypotheses(parts: WindowParts, inputs: Sequence[Sequence[Any]] = ()) -> Iterator[Hypothesis]:
    """Yield the right gradient first, then that of every mistake in the micro-batches' weights.

    `inputs` are the micro-batches of every rank.
    """
    yield Hypothesis(RIGHT, "the undivided batch", parts.right)
    others = _other_units(parts.units, inputs) if inputs else ()
    for key, variant, weights in chain(wrong_weights(parts.units, parts.nominal), others):
        yield Hypothesis(key, variant, parts.weighted(weights))


def weightings(units: Sequence[Sequence[float]], nominal: int) -> Iterator[Hypothesis]:
    """Yield the right weights of the micro-batches of all ranks, then those of every mistake."""
    total = sum(chain(*units))
    yield Hypothesis(RIGHT, "the undivided batch", _flat([_times(row, 1 / total) for row in units]))
    for key, variant, weights in wrong_weights(units, nominal):
        yield Hypothesis(key, variant, _flat(weights))


def _flat(weights: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(list(chain(*weights)), dtype=torch.float64)


_Weights = Iterator[tuple[str, str, Sequence[Sequence[float]]]]
"""The key and variant of mistakes, and the weights of every rank's micro-batches in them."""


def wrong_weights(units: Sequence[Sequence[float]], nominal: int) -> _Weights:
    """Yield mistakes in how the micro-batches of every rank are weighed.

    Of several ranks, each may take shares of its own units, or of those of all.
    """
    ranks = len(units)
    own, mean = [sum(row) or 1.0 for row in units], sum(chain(*units)) / ranks or 1.0
    for totals in (own, [mean] * ranks) if len(set(own)) > 1 else (own,):
        flags = (any(len(row) != nominal for row in units), len(set(chain(*units))) > 1)
        made = (
            _wrong_shares(row, nominal, total, *flags)
            for row, total in zip(units, totals, strict=True)
        )
        for of_ranks in zip(*made, strict=True):
            key, variant, _ = of_ranks[0]
            yield key, variant, [_times(weights, 1 / ranks) for _, _, weights in of_ranks]
    if ranks > 1:  # in how their gradients are put together
        even = [[1 / len(row)] * len(row) for row in units]
        shares = [_times(row, 1 / total) for row, total in zip(units, own, strict=True)]
        averaged = [_times(row, 1 / ranks) for row in shares]
        yield "mean-of-means", "each rank's own mean, averaged over the ranks", averaged
        yield "ranks-added", "means of the ranks, summed", even
        yield "ranks-added", "means over units of the ranks, summed", shares
        of_all = [_times(row, 1 / mean) for row in units]
        yield "ranks-added", "the mean, times the ranks", of_all
        forgotten, more = "world-size-forgotten", f"divided by {ranks} a second time"
        yield forgotten, f"the mean, {more}", [_times(row, 1 / ranks**2) for row in of_all]
        yield forgotten, f"mean losses, {more}", [_times(row, 1 / ranks**2) for row in even]


def _wrong_shares(
    units: Sequence[float], nominal: int, total: float, is_short: bool, is_uneven: bool
) -> Iterator[tuple[str, str, Sequence[float]]]:
    """Yield the wrong weights of one rank; every rank yields as many."""
    count = len(units)
    ones, shares = [1.0] * count, [unit / total for unit in units]
    even = _times(ones, 1 / count)
    yield "mean-of-means", "mean losses divided by the number of micro-batches", even
    if is_short:
        yield "nominal-count", f"mean losses divided by {nominal}", _times(ones, 1 / nominal)
        factor = count / nominal
        yield "nominal-count", f"the mean, times {count}/{nominal}", _times(shares, factor)
    yield "not-divided", "mean losses added", ones
    yield "not-divided", "sums added", units
    yield "not-divided", f"the mean, times {count}", _times(shares, count)
    for one, other in ((count, count), (count, nominal), (nominal, nominal)):
        divided = _times(ones, 1 / (one * other))
        yield "divided-twice", f"mean losses divided by {one}·{other}", divided
    for divisor in (count, nominal):
        yield "divided-twice", f"the mean divided by {divisor}", _times(shares, 1 / divisor)
    if is_uneven:
        own = [1 / unit if unit else 0.0 for unit in units]
        yield "other-units", "mean losses divided by their own units a second time", own
    each = [count ** -float(count - place) for place in range(count)]
    yield "divided-twice", f"by {count} after every backward, with all gradients so far", each
    for variant, weights in (("sums", shares), ("means", even)):
        again = [weight * (count - place) for place, weight in enumerate(weights)]
        yield "counted-twice", f"the {variant} so far, added again with every backward", again
    for which, place in (("last", count - 1), ("first", 0)):
        yield from _wrong_with_one(units, nominal, total, which, place)


def _wrong_with_one(
    units: Sequence[float], nominal: int, total: float, which: str, place: int
) -> Iterator[tuple[str, str, Sequence[float]]]:
    """Yield mistakes in which one micro-batch is alone, left out or counted twice."""
    count, size = len(units), units[place]
    alone = [float(one == place) for one in range(count)]
    scales = [("its mean", 1.0), ("its sum", size), ("its share of the units", size / total)]
    scales += [(f"its mean / {steps}", 1 / steps) for steps in (count, nominal)]
    for variant, scale in scales:
        yield f"only-the-{which}", variant, _times(alone, scale)
    for over, shares in (
        ("units", [unit / total for unit in units]),
        ("means", [1 / count] * count),
    ):
        share = shares[place]
        for key, sign in (("left-out", -1), ("counted-twice", 1)):
            weights = [w + sign * a * share for w, a in zip(shares, alone, strict=True)]
            yield key, f"the {which}, over all {over}", weights
            own = "others'" if sign < 0 else "all and its own"
            rest = _times(weights, 1 / (sum(weights) or 1.0))
            yield key, f"the {which}, over the {own} {over}", rest


def _times(weights: Sequence[float], factor: float) -> list[float]:
    return [weight * factor for weight in weights]


def _other_units(units: Sequence[Sequence[float]], inputs: Sequence[Sequence[Any]]) -> _Weights:
    """Yield weights by samples or by tokens with their padding, instead of the units."""
    counts: dict[str, list[list[float]]] = {}
    tensors = [[[v for v in tensors_of(one) if v.dim() > 0] for one in row] for row in inputs]
    if all(chain(*tensors)):
        counts["samples"] = [[float(len(one[0])) for one in row] for row in tensors]
    tokens = [
        [[v for v in one if v.dim() > 1 and not v.is_floating_point()] for one in row]
        for row in tensors
    ]
    if all(chain(*tokens)):
        counts["tokens, with padding"] = [
            [float(one[-1].shape[:2].numel()) for one in row] for row in tokens
        ]
    for name, counted in counts.items():
        if counted == [list(row) for row in units]:
            continue
        wrong = {f"sums divided by {name}": [list(row) for row in units]}
        if len(set(chain(*counted))) > 1:  # else it is a mean of means
            wrong[f"mean losses weighed by {name}"] = counted
        everywhere, ranks = sum(chain(*counted)), len(units)
        for variant, weights in wrong.items():
            pairs = list(zip(weights, counted, strict=True))
            yield "other-units", variant, [_times(w, 1 / sum(c) / ranks) for w, c in pairs]
            every = [_times(row, 1 / everywhere) for row in weights]
            yield "other-units", f"{variant} of all ranks", every
