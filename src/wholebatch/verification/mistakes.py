"""The update that each known mistake would make, so that an observed one can be told by its name.

All are made from the same parts: the gradient of each micro-batch's mean, and its units. The right
gradient is `sum of units × mean gradient / sum of units`; a mistake weighs, divides or clips
otherwise, and each has the variants that are seen in the wild.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholebatch.verification.batch_reading import Reading, joined
from wholebatch.verification.model_runs import Bench
from wholebatch.verification.observed_window import Run, Seen, Start, Watch
from wholebatch.verification.run_comparison import TIMES_THE_FLOOR
from wholebatch.verification.undivided_batch import any_rank, apart, largest, over_ranks, ranks

__all__ = [
    "MISTAKES",
    "RIGHT",
    "Guess",
    "Mistake",
    "Parts",
    "always_active",
    "fits_of",
    "guesses",
    "moved_otherwise",
    "parts_of",
]


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
class Fit:
    """How far the observed gradients are from those of one hypothesis."""

    key: str
    variant: str
    distance: float
    fits: bool

    @property
    def name(self) -> str:
        return "right" if self.key == RIGHT else MISTAKES[self.key].name


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


def parts_of(
    bench: Bench, micros: Sequence[Any], *, steps: int, clip_norm: float | None = None
) -> tuple[Parts, float]:
    """The window taken apart, and how far rounding brings the right gradient from itself."""
    like = bench.parameters
    means, units = [], []
    for micro in micros:
        gradient, counted = bench.gradient_of(micro)
        count = counted[0]
        means.append(flat(gradient, like) / (count or 1.0))
        units.append(count)
    everywhere = float(over_ranks(torch.tensor([sum(units)], dtype=torch.float64)))
    added = torch.stack([m * u for m, u in zip(means, units, strict=True)]).sum(0)
    added = over_ranks(added) / everywhere
    right, others = added, []
    whole = joined(micros)
    if whole is not None:
        right = over_ranks(flat(bench.gradient_of(whole)[0], like)) / everywhere
        reading = Reading()
        order = list(reversed(range(reading.size(whole))))
        turned = reading.permuted(whole, order)
        others.append(over_ranks(flat(bench.gradient_of(turned)[0], like)) / everywhere)
    unit = bench.numbers.unit(bench.model)
    limit = math.sqrt(unit) / TIMES_THE_FLOOR
    floor = max([unit, *(apart(other, right) for other in others)])
    coupled = apart(added, right)
    if coupled <= limit:  # else a layer couples the samples, and that is no rounding
        floor = max(floor, coupled)
    parts = Parts(
        right=right,
        means=means,
        units=units,
        nominal=steps,
        ranks=ranks(),
        over_ranks=over_ranks,
        clip_norm=clip_norm,
    )
    return parts, min(floor, limit)


def fits_of(
    bench: Bench, parts: Parts, run: Run, micros: Sequence[Any], floor: float
) -> tuple[list[Fit], str, float]:
    """Every hypothesis with its distance to what was observed, the nearest first."""
    like = bench.parameters
    moved = math.hypot(*(float(u.double().norm()) for u in run.update)) > 0
    tolerance = TIMES_THE_FLOOR * floor
    missed = Fit(RIGHT, "the undivided batch", 1.0, False)
    if not any_rank(bool(run.steps)) and not any_rank(moved):
        return [Fit("no-update", "no optimizer step", 0.0, True), missed], "steps", tolerance
    if largest(len(run.steps)) != -largest(-len(run.steps)):
        alone = Fit("unsynchronised-ranks", "another number of steps on each rank", 0.0, True)
        return [alone, missed], "steps", tolerance
    candidates: Iterable[Guess] = guesses(parts)
    if len(run.steps) > 1:
        simulate = _simulation(bench, micros, parts, run.steps)
        stepped = stepped_guesses(parts, simulate) if len(run.steps) == parts.count else ()
        candidates = [*candidates, *stepped]
    if run.steps:
        observed = [flat(step.gradients, like) for step in run.steps]
        by = "gradients"
    else:  # an engine of its own stepped: what is left to see is the update
        observed = [flat(run.update, like)]
        candidates = [_as_update(bench, guess) for guess in candidates]
        by = "updates"
        before = [float(bench.start.before(p).double().norm()) for p in like]
        size = float(observed[0].norm())
        tolerance += TIMES_THE_FLOOR * 6e-8 * math.hypot(*before) / size if size else 0.0
    best: dict[str, Fit] = {}
    right: tuple[Tensor, ...] = ()
    for guess in candidates:
        right = right or guess.steps
        if guess.key != RIGHT and largest(_steps_apart(guess.steps, right)) <= tolerance:
            continue  # cannot be told from the right one in this window
        far = largest(_steps_apart(observed, guess.steps))
        if guess.key not in best or far < best[guess.key].distance:
            best[guess.key] = Fit(guess.key, guess.variant, far, far <= tolerance)
    ordered = sorted(best.values(), key=lambda fit: (fit.distance, fit.key != RIGHT))
    return ordered, by, tolerance


def _as_update(bench: Bench, guess: Guess) -> Guess:
    return Guess(guess.key, guess.variant, (_update_of(bench, guess.steps[0], ()),))


def _update_of(bench: Bench, gradient: Tensor, groups: Sequence[dict[str, Any]]) -> Tensor:
    """What the optimizer makes of a gradient, with the settings that the loop's had."""
    bench.begin()
    _set_gradients(bench, gradient)
    _set_groups(bench.optimizer, groups)
    with Watch(bench.model, bench.parameters) as watch:
        bench.optimizer.step()
        return flat(watch.run(bench.start).update, bench.parameters)


def _simulation(
    bench: Bench, micros: Sequence[Any], parts: Parts, seen: Sequence[Seen]
) -> Callable[[Sequence[float], bool], list[Tensor]]:
    def simulate(weights: Sequence[float], cleared: bool) -> list[Tensor]:
        bench.begin()
        start, bench.start = bench.start, _Here(bench.start)
        steps, held = [], torch.zeros_like(parts.right)
        try:
            for micro, weight, step in zip(micros, weights, seen, strict=True):
                gradient, counted = bench.gradient_of(micro)
                scale = weight / (counted[0] or 1.0)
                held = held + parts.average(flat(gradient, bench.parameters) * scale)
                held = parts.clip(held)
                steps.append(held)
                _set_gradients(bench, held)
                _set_groups(bench.optimizer, step.groups)
                bench.optimizer.step()
                bench.optimizer.zero_grad()
                if cleared:
                    held = torch.zeros_like(held)
        finally:
            bench.start = start
        return steps

    return simulate


def moved_otherwise(bench: Bench, run: Run) -> list[str]:
    """A note where the update is not the one that the optimizer makes of what it saw."""
    if len(run.steps) != 1:
        return []
    groups = run.steps[0].groups
    if len(groups) != len(bench.optimizer.param_groups):
        return []
    observed = flat(run.update, bench.parameters)
    gradient = flat(run.gradients, bench.parameters)
    made = _update_of(bench, gradient, groups)
    before = [float(bench.start.before(p).double().norm()) for p in bench.parameters]
    size = max(float(made.norm()), 1e-30)
    limit = 1e-4 + TIMES_THE_FLOOR * 6e-8 * math.hypot(*before) / size
    if apart(observed, made) <= limit:
        return []
    return [
        "the parameters did not move as the optimizer moves them with this gradient: the loop "
        "changes them, or its optimizer, in another place too"
    ]


class _Here(Start):
    """A start that stays where it is: gradients are taken at the weights of the moment."""

    def __init__(self, other: Start) -> None:
        self.__dict__.update(vars(other))

    def restore(self) -> None:
        return


def _set_gradients(bench: Bench, gradient: Tensor) -> None:
    at = 0
    for parameter in bench.parameters:
        part = gradient[at : at + parameter.numel()].view(parameter.shape)
        parameter.grad = part.to(parameter.device, parameter.dtype)
        at += parameter.numel()


def _set_groups(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    if len(groups) == len(optimizer.param_groups):
        for group, seen in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in seen.items() if name in group})


def always_active(parts: Parts) -> float:
    """A limit of the norm at which every clipping, wherever it stands, cuts something off."""
    smallest = min(float(mean.norm()) for mean in parts.means) / max(parts.count, parts.nominal)
    limit = 0.5 * min(float(parts.right.norm()), smallest)
    return -largest(-limit)


def _steps_apart(observed: Sequence[Tensor], guessed: Sequence[Tensor]) -> float:
    if len(observed) != len(guessed):
        # Not the same number of steps: as far apart as nothing is from something.
        return math.inf if len(guessed) > 1 or len(observed) > 1 else 1.0
    return apart(torch.cat(list(observed)), torch.cat(list(guessed)))
