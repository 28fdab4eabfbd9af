"""The update that each known mistake would make, so that an observed one can be told by its name.

All are made from the same parts: the gradient of each micro-batch's mean, and its units. The right
gradient is `sum of units × mean gradient / sum of units`; a mistake weighs, divides or clips
otherwise, and each has the variants that are seen in the wild.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["MISTAKES", "RIGHT", "Guess", "Mistake", "Parts", "guesses"]

RIGHT = "right"


@dataclass(frozen=True)
class Mistake:
    """A known mistake: its name, what it does, and what to do instead."""

    name: str
    does: str
    instead: str


MISTAKES: dict[str, Mistake] = {
    "not-divided": Mistake(
        "not divided",
        "the micro-batches' gradients are added and never divided",
        "divide the sum by all units of the window, once",
    ),
    "divided-twice": Mistake(
        "divided twice",
        "the gradient is divided by the number of micro-batches once more than it should be",
        "one of two places divides already (Accelerate, DeepSpeed, Lightning do): leave out yours",
    ),
    "only-the-last": Mistake(
        "only the last micro-batch",
        "the gradients of all micro-batches but the last are thrown away",
        "call zero_grad() after the step, not before every backward",
    ),
    "only-the-first": Mistake(
        "only the first micro-batch",
        "the step is made after the first micro-batch and the others are not in it",
        "step when (i + 1) % steps == 0, not when i % steps == 0",
    ),
    "left-out": Mistake(
        "a micro-batch left out",
        "the first or the last micro-batch of the window is not in the update",
        "step after the last backward of the window, and leave no micro-batch behind",
    ),
    "counted-twice": Mistake(
        "a micro-batch counted twice",
        "the first or the last micro-batch of the window is in the update twice",
        "one backward for every micro-batch",
    ),
    "never-cleared": Mistake(
        "gradients never cleared",
        "the gradients of a window are still there in the next one, and are added to its own",
        "call zero_grad() once per window: after the step, or before the first backward",
    ),
    "mean-of-means": Mistake(
        "mean of means",
        "every micro-batch counts the same, however many samples or tokens it has",
        "add sums, and divide once by all units of the window",
    ),
    "clipped-per-micro-batch": Mistake(
        "clipped per micro-batch",
        "the gradient is clipped after every backward, so each micro-batch is cut down on its own",
        "clip once, right before the step",
    ),
    "nominal-count": Mistake(
        "nominal count on a short window",
        "a window with fewer micro-batches is divided by the full number all the same",
        "divide by what the window really holds: its units",
    ),
    "no-update": Mistake(
        "no update",
        "the optimizer does not step on this window: its micro-batches are lost, or leak into the "
        "next one",
        "step at the end of the data too, whatever the count has come to",
    ),
    "stepped-every-micro-batch": Mistake(
        "stepped every micro-batch",
        "the optimizer steps after every micro-batch: small batches, not a large one",
        "step once per window",
    ),
    "unsynchronised-ranks": Mistake(
        "unsynchronised ranks",
        "each rank steps with the gradient of its own batch, and their weights drift apart",
        "let the last backward of a window reduce (leave no_sync), or all-reduce before the step",
    ),
    "ranks-added": Mistake(
        "ranks added, not averaged",
        "the gradients of the ranks are summed, so they are as many times too large",
        "divide by the units of all ranks",
    ),
    "coupled": Mistake(
        "coupled samples",
        "the loop adds its micro-batches rightly, but a layer (BatchNorm) or the loss couples the "
        "samples of a batch, so no plain accumulation gives the undivided batch's gradient",
        'wb.WholeBatch(batchnorm="exact"), or a layer that works on each sample alone',
    ),
}


@dataclass(frozen=True)
class Guess:
    """What the optimizer's steps would see if this were the mistake (or the right thing)."""

    key: str
    variant: str
    steps: tuple[Tensor, ...]


@dataclass(frozen=True)
class Parts:
    """One window taken apart, on this rank: flat gradients in float64.

    `over_ranks` adds a tensor over the ranks and returns it; on one rank it returns it as it is.
    """

    right: Tensor
    means: Sequence[Tensor]
    units: Sequence[float]
    nominal: int
    ranks: int
    over_ranks: Callable[[Tensor], Tensor]
    clip_norm: float | None = None

    @property
    def count(self) -> int:
        return len(self.means)

    def clip(self, gradient: Tensor) -> Tensor:
        """As torch clips, by the norm."""
        if self.clip_norm is None:
            return gradient
        return gradient * min(1.0, self.clip_norm / (float(gradient.norm()) + 1e-6))

    def average(self, local: Tensor) -> Tensor:
        """What averaging over the ranks makes of every rank's own."""
        return self.over_ranks(local.clone()) / self.ranks


def guesses(parts: Parts) -> Iterator[Guess]:
    """The right gradient first, then every mistake that has exactly one step."""
    yield Guess(RIGHT, "the undivided batch", (parts.clip(parts.right),))
    if parts.clip_norm is not None:
        by_hand = min(1.0, parts.clip_norm / max(float(parts.right.norm()), 1e-30))
        yield Guess(
            RIGHT, "the undivided batch, clipped without torch's 1e-6", (parts.right * by_hand,)
        )
    local = dict(_locals(parts))
    added = _weighted(parts, [u / sum(parts.units) for u in parts.units])
    for (key, variant), gradient in local.items():
        yield Guess(key, variant, (parts.clip(parts.average(gradient)),))
    everywhere = parts.over_ranks(torch.tensor([float(sum(parts.units))], dtype=torch.float64))
    summed = _weighted(parts, list(parts.units))
    yield Guess(
        "coupled",
        "each micro-batch on its own, weighted rightly",
        (parts.clip(parts.over_ranks(summed.clone()) / float(everywhere)),),
    )
    yield from _clipped(parts)
    if parts.ranks > 1:
        means = _weighted(parts, [1 / parts.count] * parts.count)
        yield Guess("unsynchronised-ranks", "this rank's own mean over units", (parts.clip(added),))
        yield Guess("unsynchronised-ranks", "this rank's mean of means", (parts.clip(means),))
        share = summed * (parts.ranks / float(everywhere))
        yield Guess("unsynchronised-ranks", "this rank's share of all units", (parts.clip(share),))
        yield Guess(
            "mean-of-means",
            "each rank's own mean, averaged over the ranks",
            (parts.clip(parts.average(added)),),
        )
        for variant, gradient in (("means", means), ("means over units", added)):
            total = parts.over_ranks(gradient.clone())
            yield Guess("ranks-added", f"{variant} of the ranks, summed", (parts.clip(total),))


def _locals(parts: Parts) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Mistakes in how one rank weighs its micro-batches."""
    count, nominal, units = parts.count, parts.nominal, list(parts.units)
    total = sum(units)
    means, last, first = _weighted(parts, [1.0] * count), parts.means[-1], parts.means[0]
    sums = _weighted(parts, units)
    yield ("mean-of-means", "mean losses divided by the number of micro-batches"), means / count
    if nominal != count:
        yield ("nominal-count", f"mean losses divided by {nominal}"), means / nominal
        yield (
            ("nominal-count", f"the mean, times {count}/{nominal}"),
            sums * count / (total * nominal),
        )
        yield ("divided-twice", f"mean losses divided by {nominal}²"), means / nominal**2
        yield (
            ("divided-twice", f"mean losses divided by {count}·{nominal}"),
            means / (count * nominal),
        )
        yield ("divided-twice", f"the mean divided by {nominal}"), sums / (total * nominal)
    yield ("not-divided", "mean losses added"), means
    yield ("not-divided", "sums added"), sums
    yield ("divided-twice", f"mean losses divided by {count}²"), means / count**2
    yield ("divided-twice", f"the mean divided by {count}"), sums / (total * count)
    for key, one, size in (
        ("only-the-last", last, units[-1]),
        ("only-the-first", first, units[0]),
    ):
        scales = {
            "its mean": 1.0,
            f"its mean / {count}": 1 / count,
            f"its mean / {nominal}": 1 / nominal,
        }
        scales |= {"its share of the units": size / total, "its sum": size}
        for variant, scale in scales.items():
            yield (key, variant), one * scale
        which = key.rpartition("-")[2]
        if count > 2:
            yield ("left-out", f"the {which}, over the units"), (sums - one * size) / total
            if total > size:
                others = (sums - one * size) / (total - size)
                yield ("left-out", f"the {which}, over the others' units"), others
            yield ("left-out", f"the {which} of the means / {count}"), (means - one) / count
            yield ("left-out", f"the {which} of the means"), (means - one) / (count - 1)
        twice = sums + one * size
        yield ("counted-twice", f"the {which}, over the units"), twice / total
        yield ("counted-twice", f"the {which}, over the units and its own"), twice / (total + size)
        yield ("counted-twice", f"the {which} of the means / {count}"), (means + one) / count


def _weighted(parts: Parts, weights: Sequence[float]) -> Tensor:
    result = torch.zeros_like(parts.right)
    for mean, weight in zip(parts.means, weights, strict=True):
        result += mean * weight
    return result


def _clipped(parts: Parts) -> Iterator[Guess]:
    """Clipped after every backward: the running sum, or each micro-batch's own gradient."""
    if parts.clip_norm is None or parts.count == 1:
        return
    count, nominal, total = parts.count, parts.nominal, sum(parts.units)
    scales: dict[str, list[float]] = {
        f"mean losses / {count}": [1 / count] * count,
        f"mean losses / {nominal}": [1 / nominal] * count,
        "shares of the units": [u / total for u in parts.units],
        "mean losses": [1.0] * count,
        "sums": list(parts.units),
    }
    everywhere = float(parts.over_ranks(torch.tensor([float(total)], dtype=torch.float64)))
    scales["shares of the units of all ranks"] = [u * parts.ranks / everywhere for u in parts.units]
    for variant, weights in scales.items():
        running = torch.zeros_like(parts.right)
        alone = torch.zeros_like(parts.right)
        for mean, weight in zip(parts.means, weights, strict=True):
            running = parts.clip(running + mean * weight)
            alone = alone + parts.clip(mean * weight)
        for how, gradient in (("running sum of", running), ("each of", alone)):
            key = "clipped-per-micro-batch"
            named = f"{how} {variant}"
            averaged = parts.average(gradient)
            yield Guess(key, named, (averaged,))
            yield Guess(key, f"{named}, then divided by {count}", (averaged / count,))
            yield Guess(key, f"{named}, then by the units", (averaged / total,))
            if how == "each of":
                yield Guess(key, f"{named}, and once more", (parts.clip(averaged),))
                yield Guess(
                    key,
                    f"{named}, divided by {count} and once more",
                    (parts.clip(averaged / count),),
                )


def stepped_guesses(
    parts: Parts, simulate: Callable[[Sequence[float], bool], Sequence[Tensor]]
) -> Iterator[Guess]:
    """The mistake with a step for every micro-batch.

    `simulate(weights, cleared)` trains so, with these weights of the micro-batches' means and the
    gradients cleared after each step or not, and returns what each step saw.
    """
    count, total = parts.count, sum(parts.units)
    scales: dict[str, list[float]] = {
        "mean losses": [1.0] * count,
        f"mean losses / {count}": [1 / count] * count,
        f"mean losses / {parts.nominal}": [1 / parts.nominal] * count,
        "shares of the units": [u / total for u in parts.units],
        "sums": list(parts.units),
    }
    for variant, weights in scales.items():
        for cleared in (True, False):
            left = "" if cleared else ", gradients never cleared"
            yield Guess(
                "stepped-every-micro-batch", variant + left, tuple(simulate(weights, cleared))
            )


def flat(tensors: Sequence[Any], like: Sequence[Tensor]) -> Tensor:
    """All gradients one after the other, in float64; None is zero."""
    return torch.cat(
        [
            torch.zeros(p.numel(), dtype=torch.float64)
            if t is None
            else t.detach().to("cpu", torch.float64).flatten()
            for t, p in zip(tensors, like, strict=True)
        ]
    )
