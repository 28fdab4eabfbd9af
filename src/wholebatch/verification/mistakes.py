"""The known mistakes, and the gradient that each would make, so that it can be told by its name.

All are made from the same parts: the gradient of each micro-batch's mean, and its units. The right
gradient is `sum of units × mean gradient / sum of units`; a mistake weighs or divides otherwise,
and each has the variants that are seen in the wild.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch.batch.samples import tensors_of
from wholebatch.distributed.process_group import largest_over_ranks, sum_over_ranks, world_size
from wholebatch.verification.run_comparison import distance

RIGHT = "right"
NOT_JUDGED = "not judged"
STEPPED_TWICE = ("two-owners", "two optimizers step on the same gradients")
"""A mistake that needs no gradient to be told: its key, and what was seen."""


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
    """One window taken apart, on this rank: flat gradients in float64."""

    right: Tensor
    means: Sequence[Tensor]
    units: Sequence[float]
    nominal: int
    """The number of micro-batches that the loop calls a full window."""

    @property
    def units_everywhere(self) -> float:
        """Return the units of all ranks."""
        return float(sum_over_ranks(torch.tensor([float(sum(self.units))], dtype=torch.float64)))

    def weighted(self, weights: Sequence[float]) -> Tensor:
        """Return the weighted sum of the micro-batches' mean gradients."""
        pairs = zip(self.means, weights, strict=True)
        return sum((mean * weight for mean, weight in pairs), torch.zeros_like(self.right))


def nearest(
    candidates: Iterator[Hypothesis],
    observed: Tensor,
    tolerance: float,
    as_seen: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> list[MistakeFit]:
    """Return the best variant of every hypothesis, the nearest first; the first of all is right.

    `as_seen` makes of a gradient what was observed: a clipped one, or an update.
    """
    best: dict[str, MistakeFit] = {}
    right = None
    for one in candidates:
        made = as_seen(one.gradient)
        right = made if right is None else right
        if one.key != RIGHT and largest_over_ranks(apart(made, right)) <= tolerance:
            continue  # cannot be told from the right one in this window
        far = largest_over_ranks(apart(observed, made))
        if one.key not in best or far < best[one.key].distance:
            best[one.key] = MistakeFit(one.key, one.variant, far, far <= tolerance)
    return sorted(best.values(), key=lambda fit: (fit.distance, fit.key != RIGHT))


def apart(ours: Tensor, right: Tensor) -> float:
    return distance([ours], [right])


# ------------------------------------------------------------------- hypotheses


def hypotheses(parts: WindowParts, inputs: Sequence[Any] = ()) -> Iterator[Hypothesis]:
    """Yield the right gradient first, then that of every mistake in the micro-batches' weights.

    `inputs` are the micro-batches, or what the model was given of each.
    """
    yield Hypothesis(RIGHT, "the undivided batch", parts.right)
    others = _other_units(parts, inputs) if inputs else ()
    for key, variant, weights in chain(wrong_weights(parts), others):
        averaged = sum_over_ranks(parts.weighted(weights)) / world_size()
        yield Hypothesis(key, variant, averaged)


_Weights = Iterator[tuple[str, str, Sequence[float]]]
"""The key and variant of mistakes, and the weights of the micro-batches' means in them."""


def wrong_weights(parts: WindowParts) -> _Weights:
    """Yield mistakes in how one rank weighs its micro-batches; every rank yields as many.

    Of several ranks, each may take shares of its own units, or of those of all.
    """
    units, ranks = parts.units, world_size()
    own, mean = sum(units) or 1.0, parts.units_everywhere / ranks
    for total in (own, mean) if largest_over_ranks(abs(own - mean)) else (own,):
        yield from _wrong_shares(units, parts.nominal, total)
    if ranks > 1:  # in how their gradients are put together
        even, shares = [1 / len(units)] * len(units), _times(units, 1 / own)
        yield "mean-of-means", "each rank's own mean, averaged over the ranks", shares
        yield "ranks-added", "means of the ranks, summed", _times(even, ranks)
        yield "ranks-added", "means over units of the ranks, summed", _times(shares, ranks)
        forgotten, more = "world-size-forgotten", f"divided by {ranks} once more"
        yield forgotten, f"the mean, {more}", _times(units, 1 / (mean * ranks))
        yield forgotten, f"mean losses, {more}", _times(even, 1 / ranks)


def _wrong_shares(units: Sequence[float], nominal: int, total: float) -> _Weights:
    count = len(units)
    ones, shares = [1.0] * count, [unit / total for unit in units]
    even = _times(ones, 1 / count)
    yield "mean-of-means", "mean losses divided by the number of micro-batches", even
    if largest_over_ranks(count != nominal):
        yield "nominal-count", f"mean losses divided by {nominal}", _times(ones, 1 / nominal)
        factor = count / nominal
        yield "nominal-count", f"the mean, times {count}/{nominal}", _times(shares, factor)
    yield "not-divided", "mean losses added", ones
    yield "not-divided", "sums added", units
    for one, other in ((count, count), (count, nominal), (nominal, nominal)):
        divided = _times(ones, 1 / (one * other))
        yield "divided-twice", f"mean losses divided by {one}·{other}", divided
    for divisor in (count, nominal):
        yield "divided-twice", f"the mean divided by {divisor}", _times(shares, 1 / divisor)
    if largest_over_ranks(len(set(units)) > 1) and not largest_over_ranks(not all(units)):
        own = [1 / unit for unit in units]
        yield "other-units", "mean losses divided by their own units once more", own
    each = [count ** -float(count - place) for place in range(count)]
    yield "divided-twice", f"by {count} after every backward, with what is there", each
    for variant, weights in (("sums", shares), ("means", even)):
        again = [weight * (count - place) for place, weight in enumerate(weights)]
        yield "counted-twice", f"the {variant} so far, once more with every backward", again
    for which, place in (("last", count - 1), ("first", 0)):
        yield from _wrong_with_one(units, nominal, total, which, place)


def _wrong_with_one(
    units: Sequence[float], nominal: int, total: float, which: str, place: int
) -> _Weights:
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
            if sign < 0 and largest_over_ranks(-count) > -3:
                continue
            weights = [w + sign * a * share for w, a in zip(shares, alone, strict=True)]
            yield key, f"the {which}, over all {over}", weights
            own = "others'" if sign < 0 else "all and its own"
            rest = _times(weights, 1 / (sum(weights) or 1.0))
            yield key, f"the {which}, over the {own} {over}", rest


def _times(weights: Sequence[float], factor: float) -> list[float]:
    return [weight * factor for weight in weights]


def _other_units(parts: WindowParts, inputs: Sequence[Any]) -> _Weights:
    """Yield weights by samples or by tokens with their padding, instead of the units."""
    tensors = [[v for v in tensors_of(one) if v.dim() > 0] for one in inputs]
    tokens = [[v for v in one if v.dim() > 1 and not v.is_floating_point()] for one in tensors]
    counts: dict[str, list[float]] = {}
    if all(tensors):
        counts["samples"] = [float(len(one[0])) for one in tensors]
    if all(tokens):
        counts["tokens, with padding"] = [float(one[-1].shape[:2].numel()) for one in tokens]
    for name, counted in counts.items():
        if not largest_over_ranks(counted != list(parts.units)):
            continue
        wrong = {f"sums divided by {name}": list(parts.units)}
        if largest_over_ranks(len(set(counted)) > 1):  # else it is a mean of means
            wrong[f"mean losses weighed by {name}"] = counted
        local = sum(counted)
        everywhere = float(sum_over_ranks(torch.tensor([local], dtype=torch.float64)))
        for variant, weights in wrong.items():
            yield "other-units", variant, _times(weights, 1 / local)
            every = _times(weights, world_size() / everywhere)
            yield "other-units", f"{variant} of all ranks", every
