"""The update that each known mistake would make, so that an observed one can be told by its name.

All are made from the same parts: the gradient of each micro-batch's mean, and its units. The right
gradient is `sum of units × mean gradient / sum of units`; a mistake weighs, divides or clips
otherwise, and each has the variants that are seen in the wild.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.core.splitting.samples import flatten
from wholebatch.distributed.process_group import largest_over_ranks, sum_over_ranks, world_size
from wholebatch.verification.model_runs import DividedBatch, ModelRuns, joined
from wholebatch.verification.observed_window import SeenStep, WindowObserver, WindowRun
from wholebatch.verification.run_comparison import TIMES_THE_FLOOR, Vectors, distance

RIGHT = "right"
NOT_JUDGED = "not judged"


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
    "clipped-too-early": Mistake(
        "clipped too early",
        "the gradient is clipped before it is complete: before the last backward, or before it is "
        "divided",
        "clip right before the step, after the last backward and the division",
    ),
    "other-units": Mistake(
        "weighed by other units",
        "the micro-batches are weighed or divided by their samples or padded tokens, but the loss "
        "is a mean over the labels that count",
        "count the labels that the loss counts (labels != -100), and divide by those of the window",
    ),
    "scheduled-per-micro-batch": Mistake(
        "schedule stepped per micro-batch",
        "the learning rate changes between the micro-batches of a window: the schedule runs as "
        "many times too fast",
        "call scheduler.step() once per window, after optimizer.step()",
    ),
    "moved-beside-the-step": Mistake(
        "weights changed beside the step",
        "the gradient is right, but the parameters did not move as the optimizer moves them with "
        "it: the loop changes them in another place too",
        "let the optimizer alone change the trained weights, and keep an average (EMA) in a copy",
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
    "world-size-forgotten": Mistake(
        "world size forgotten",
        "the loss is divided by the units of all ranks, and DistributedDataParallel averages the "
        "ranks after that: the gradient is as many times too small as there are ranks",
        "multiply the loss by the number of ranks",
    ),
    "cleared-in-the-window": Mistake(
        "cleared in the window",
        "the gradients are cleared between two micro-batches of a window: those before are lost",
        "call zero_grad() in one place, right after the step; a trainer calls it already",
    ),
    "moved-in-the-window": Mistake(
        "weights changed in the window",
        "the weights change between the micro-batches of a window (weight decay, an average or a "
        "clamp after every backward), so their gradients are not of the same weights",
        "change the weights once per window, after the step; let the optimizer decay them",
    ),
    "averaged-per-micro-batch": Mistake(
        "average updated per micro-batch",
        "an average of the weights (EMA) is updated after every micro-batch: it forgets as many "
        "times too fast",
        "update the average once per window, after the step",
    ),
    "clipped-while-scaled": Mistake(
        "clipped while scaled",
        "the gradient is clipped while it is multiplied by the loss scale, so the limit is as many "
        "times too low",
        "call scaler.unscale_(optimizer) before clipping",
    ),
    "loss-scale": Mistake(
        "loss scale left in the gradient",
        "the loss scale is not divided out of the gradient before the step, or it changes between "
        "the micro-batches of a window",
        "step by scaler.step(optimizer), and call scaler.update() once per window",
    ),
    "two-owners": Mistake(
        "counted by two owners",
        "the gradient, or that of some parameters, is added in two places and counted as many "
        "times",
        "let one owner add the gradients: the loop, a hook or the engine",
    ),
    "16-bit-accumulation": Mistake(
        "added in 16 bits",
        "the gradients of the micro-batches are added in 16 bits: what is small beside the sum so "
        "far is rounded away",
        "keep the sum in float32: float32 parameters under autocast, or wb.Accumulator",
    ),
    "lost-after-resume": Mistake(
        "micro-batches lost after a resume",
        "the first window after a resume has fewer micro-batches than it is divided by: those "
        "before the checkpoint are not in it",
        "save at the end of a window, or save the gradients and the place in the window as well",
    ),
    "coupled": Mistake(
        "coupled samples",
        "the loop adds its micro-batches rightly, but a layer (BatchNorm) or the loss couples the "
        "samples of a batch, so no plain accumulation gives the undivided batch's gradient",
        'wb.WholeBatch(batchnorm="exact"), or a layer that works on each sample alone',
    ),
}


@dataclass(frozen=True)
class MistakeFit:
    """The distance of the observed gradients from those of one hypothesis."""

    key: str
    variant: str
    distance: float
    fits: bool

    @property
    def name(self) -> str:
        return "right" if self.key == RIGHT else MISTAKES[self.key].name


@dataclass(frozen=True)
class Hypothesis:
    """The gradients that the optimizer's steps would see with this mistake, or without any."""

    key: str
    variant: str
    steps: tuple[Tensor, ...]


@dataclass(frozen=True)
class WindowParts:
    """One window taken apart, on this rank: flat gradients in float64."""

    right: Tensor
    means: Sequence[Tensor]
    units: Sequence[float]
    nominal: int
    clip_norm: float | None = None
    clip_value: float | None = None

    @property
    def clips(self) -> bool:
        return self.clip_norm is not None or self.clip_value is not None

    @property
    def count(self) -> int:
        return len(self.means)

    @property
    def units_everywhere(self) -> float:
        """Return the units of all ranks."""
        return float(sum_over_ranks(torch.tensor([float(sum(self.units))], dtype=torch.float64)))

    def weighted(self, weights: Sequence[float]) -> Tensor:
        """Return the weighted sum of the micro-batches' mean gradients."""
        result = torch.zeros_like(self.right)
        for mean, weight in zip(self.means, weights, strict=True):
            result += mean * weight
        return result

    def clip(self, gradient: Tensor) -> Tensor:
        """Return the gradient clipped by its values or its norm, as torch clips."""
        if self.clip_value is not None:
            gradient = gradient.clamp(-self.clip_value, self.clip_value)
        if self.clip_norm is None:
            return gradient
        return gradient * min(1.0, self.clip_norm / (float(gradient.norm()) + 1e-6))

    def average(self, local: Tensor) -> Tensor:
        """Return the mean of every rank's own gradient."""
        return sum_over_ranks(local) / world_size()

    def weightings(self) -> dict[str, list[float]]:
        """Return the usual weights of the micro-batches' means, by what is added with them."""
        total = sum(self.units)
        everywhere = self.units_everywhere / world_size()
        return {
            f"mean losses / {self.count}": [1 / self.count] * self.count,
            f"mean losses / {self.nominal}": [1 / self.nominal] * self.count,
            "shares of the units": [u / total for u in self.units],
            "mean losses": [1.0] * self.count,
            "sums": list(self.units),
            "shares of the units of all ranks": [u / everywhere for u in self.units],
        }


def parts_of(
    runs: ModelRuns,
    micros: Sequence[Any],
    *,
    steps: int,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> tuple[WindowParts, float]:
    """Take a window apart; return also how far rounding brings the right gradient from itself."""
    like = runs.parameters
    means, units = [], []
    for micro in micros:
        gradient, counted = runs.gradient_of(micro)
        means.append(flat(gradient, like) / (counted[0] or 1.0))
        units.append(counted[0])
    parts = WindowParts(torch.zeros_like(means[0]), means, units, steps, clip_norm, clip_value)
    everywhere = parts.units_everywhere
    added = torch.stack([m * u for m, u in zip(means, units, strict=True)]).sum(0)
    added = sum_over_ranks(added) / everywhere
    right, floor = added, runs.unit
    whole = joined(micros)
    if whole is not None:
        right = sum_over_ranks(flat(runs.gradient_of(whole)[0], like)) / everywhere
        (reversed_, order), _ = DividedBatch(whole).in_other_orders()
        turned = sum_over_ranks(flat(runs.gradient_of(reversed_, order)[0], like)) / everywhere
        floor = max(floor, apart(turned, right))
    limit = math.sqrt(runs.unit) / TIMES_THE_FLOOR
    coupled = apart(added, right)
    if coupled <= limit:  # else a layer couples the samples, and that is no rounding
        floor = max(floor, coupled)
    return replace(parts, right=right), min(floor, limit)


def fits_of(
    runs: ModelRuns, parts: WindowParts, run: WindowRun, micros: Sequence[Any], floor: float
) -> tuple[list[MistakeFit], str, float]:
    """Return every hypothesis with its distance to what was observed, the nearest first.

    Return also if gradients or updates were compared, and the tolerance.
    """
    tolerance = TIMES_THE_FLOOR * floor
    if (fit := _without_one_update(run)) is not None:
        return [fit, MistakeFit(RIGHT, "the undivided batch", 1.0, False)], "steps", tolerance
    if parts.clip_value is not None:  # what is left of the gradient is smaller, its rounding not
        tolerance *= float(parts.right.norm() / parts.clip(parts.right).norm())
    candidates = hypotheses(parts, micros)
    if len(run.steps) > 1 and len(run.steps) == parts.count:
        candidates += _stepped(runs, micros, parts, run.steps)
    if run.steps:
        observed = [flat(step.gradients, runs.parameters) for step in run.steps]
        by = "gradients"
    else:  # an engine of its own stepped: what is left to see is the update
        observed = [flat(run.update, runs.parameters)]
        candidates = [
            replace(one, steps=(_update_of(runs, one.steps[0], ()),)) for one in candidates
        ]
        by = "updates"
        size = float(observed[0].norm())
        tolerance += _rounded_away(runs, size) if size else 0.0
    return nearest(candidates, observed, tolerance), by, tolerance


def nearest(
    candidates: Sequence[Hypothesis], observed: Sequence[Tensor], tolerance: float
) -> list[MistakeFit]:
    """Return the best variant of every hypothesis, the nearest first; the first of all is right."""
    best: dict[str, MistakeFit] = {}
    right = candidates[0].steps
    for one in candidates:
        if one.key != RIGHT and largest_over_ranks(_steps_apart(one.steps, right)) <= tolerance:
            continue  # cannot be told from the right one in this window
        far = largest_over_ranks(_steps_apart(observed, one.steps))
        if one.key not in best or far < best[one.key].distance:
            best[one.key] = MistakeFit(one.key, one.variant, far, far <= tolerance)
    return sorted(best.values(), key=lambda fit: (fit.distance, fit.key != RIGHT))


def _without_one_update(run: WindowRun) -> MistakeFit | None:
    """Return the mistake of a window with no step, or with other numbers of steps on the ranks."""
    moved = any(float(change.double().norm()) > 0 for change in run.update)
    if not largest_over_ranks(bool(run.steps) or moved):
        return MistakeFit("no-update", "no optimizer step", 0.0, True)
    if largest_over_ranks(len(run.steps)) != -largest_over_ranks(-len(run.steps)):
        return MistakeFit("unsynchronised-ranks", "another number of steps on each rank", 0.0, True)
    return None


def _rounded_away(runs: ModelRuns, size: float) -> float:
    """Return the share of an update of this size that adding it to the parameters rounds away."""
    before = [float(runs.start.before(p).double().norm()) for p in runs.parameters]
    return TIMES_THE_FLOOR * 6e-8 * math.hypot(*before) / size


def wrong_update(
    runs: ModelRuns, run: WindowRun, settings: Sequence[Sequence[dict[str, Any]]]
) -> list[MistakeFit]:
    """Return the mistake of a step that saw the right gradient and made another update, if any.

    `settings` are the optimizer's groups at each forward. The right update has those of the first.
    """
    groups = len(runs.optimizer.param_groups)
    if len(run.steps) != 1 or not run.steps[0].repeatable or len(run.steps[0].groups) != groups:
        return []
    gradient, update = flat(run.gradients, runs.parameters), flat(run.update, runs.parameters)

    def off(groups: Sequence[dict[str, Any]]) -> tuple[float, bool]:
        made = _update_of(runs, gradient, groups)
        far = apart(update, made)
        limit = 1e-4 + _rounded_away(runs, max(float(made.norm()), 1e-30))
        return largest_over_ranks(far), bool(largest_over_ranks(far > limit))

    far, differs = off(run.steps[0].groups)
    if differs:
        fit = MistakeFit("moved-beside-the-step", "the step and something else", 0.0, True)
        return [fit, MistakeFit(RIGHT, "the optimizer's step", far, False)]
    rates = [[float(group.get("lr") or 0.0) for group in groups] for groups in settings]
    if not largest_over_ranks(any(rate != rates[0] for rate in rates)):
        return []
    from_first, differs = off(settings[0])
    if not differs:
        return []
    variant = f"from {max(rates[0]):.3g} to {max(rates[-1]):.3g} between the micro-batches"
    fit = MistakeFit("scheduled-per-micro-batch", variant, far, True)
    return [fit, MistakeFit(RIGHT, "the learning rate of the window's start", from_first, False)]


def always_active(parts: WindowParts, by: str) -> float:
    """Return a limit of the norm or value at which every clipping, wherever it is, cuts."""
    order = 2.0 if by == "norm" else math.inf
    sizes = [float(torch.linalg.vector_norm(mean, order)) for mean in parts.means]
    smallest = min(sizes) / max(parts.count, parts.nominal)
    limit = 0.5 * min(float(torch.linalg.vector_norm(parts.right, order)), smallest)
    return -largest_over_ranks(-limit)


# ------------------------------------------------------------------- hypotheses


def hypotheses(parts: WindowParts, micros: Sequence[Any]) -> list[Hypothesis]:
    """Return the right gradient, and that of every mistake that has exactly one step."""
    return [*_hypotheses(parts), *(_other_units(parts, micros) if micros else ())]


def _hypotheses(parts: WindowParts) -> Iterator[Hypothesis]:
    """Yield the right gradient first, then every mistake that has exactly one step."""
    yield Hypothesis(RIGHT, "the undivided batch", (parts.clip(parts.right),))
    if parts.clip_norm is not None:
        by_hand = min(1.0, parts.clip_norm / max(float(parts.right.norm()), 1e-30))
        yield Hypothesis(
            RIGHT, "the undivided batch, clipped without torch's 1e-6", (parts.right * by_hand,)
        )
    for key, variant, gradient in _wrong_weights(parts):
        yield Hypothesis(key, variant, (parts.clip(parts.average(gradient)),))
    everywhere, summed = parts.units_everywhere, parts.weighted(parts.units)
    yield Hypothesis(
        "coupled",
        "each micro-batch on its own, weighted rightly",
        (parts.clip(sum_over_ranks(summed) / everywhere),),
    )
    if parts.clips and parts.count > 1:
        yield from _clipped_each(parts)
        yield from _clipped_early(parts)
    if world_size() > 1:
        for key, variant, gradient in _wrong_over_ranks(parts, summed, everywhere):
            yield Hypothesis(key, variant, (parts.clip(gradient),))


_Wrong = Iterator[tuple[str, str, Tensor]]
"""The key, variant and gradient of mistakes."""


def _wrong_over_ranks(parts: WindowParts, summed: Tensor, everywhere: float) -> _Wrong:
    """Yield mistakes in how the ranks' gradients are put together."""
    means = parts.weighted([1 / parts.count] * parts.count)
    added = summed / sum(parts.units)
    alone = "unsynchronised-ranks"
    yield alone, "this rank's own mean over units", added
    yield alone, "this rank's mean of means", means
    yield alone, "this rank's share of all units", summed * (world_size() / everywhere)
    yield "mean-of-means", "each rank's own mean, averaged over the ranks", parts.average(added)
    for variant, gradient in (("means", means), ("means over units", added)):
        yield "ranks-added", f"{variant} of the ranks, summed", sum_over_ranks(gradient)
    forgotten, once_more = "world-size-forgotten", f"divided by {world_size()} once more"
    yield forgotten, f"the mean, {once_more}", sum_over_ranks(summed) / (everywhere * world_size())
    yield forgotten, f"mean losses, {once_more}", parts.average(means) / world_size()


def _wrong_weights(parts: WindowParts) -> _Wrong:
    """Yield mistakes in how one rank weighs its micro-batches."""
    count, nominal, units = parts.count, parts.nominal, list(parts.units)
    total = sum(units)
    means, sums = parts.weighted([1.0] * count), parts.weighted(units)
    yield "mean-of-means", "mean losses divided by the number of micro-batches", means / count
    if nominal != count:
        yield "nominal-count", f"mean losses divided by {nominal}", means / nominal
        yield (
            "nominal-count",
            f"the mean, times {count}/{nominal}",
            sums * count / (total * nominal),
        )
        twice, both = f"mean losses divided by {nominal}²", f"{count}·{nominal}"
        yield "divided-twice", twice, means / nominal**2
        yield "divided-twice", f"mean losses divided by {both}", means / (count * nominal)
        yield "divided-twice", f"the mean divided by {nominal}", sums / (total * nominal)
    yield "not-divided", "mean losses added", means
    yield "not-divided", "sums added", sums
    yield "divided-twice", f"mean losses divided by {count}²", means / count**2
    yield "divided-twice", f"the mean divided by {count}", sums / (total * count)
    yield from _wrong_with_one(parts, "last", -1, means, sums)
    yield from _wrong_with_one(parts, "first", 0, means, sums)


def _wrong_with_one(
    parts: WindowParts, which: str, place: int, means: Tensor, sums: Tensor
) -> _Wrong:
    """Yield mistakes in which one micro-batch is alone, left out or counted twice."""
    one, size = parts.means[place], parts.units[place]
    count, total = parts.count, sum(parts.units)
    scales = {"its mean": 1.0, f"its mean / {count}": 1 / count}
    scales |= {f"its mean / {parts.nominal}": 1 / parts.nominal}
    scales |= {"its share of the units": size / total, "its sum": size}
    for variant, scale in scales.items():
        yield f"only-the-{which}", variant, one * scale
    if count > 2:
        others = sums - one * size
        yield "left-out", f"the {which}, over the units", others / total
        if total > size:
            yield "left-out", f"the {which}, over the others' units", others / (total - size)
        yield "left-out", f"the {which} of the means / {count}", (means - one) / count
        yield "left-out", f"the {which} of the means", (means - one) / (count - 1)
    twice = sums + one * size
    yield "counted-twice", f"the {which}, over the units", twice / total
    yield "counted-twice", f"the {which}, over the units and its own", twice / (total + size)
    yield "counted-twice", f"the {which} of the means / {count}", (means + one) / count


def _other_units(parts: WindowParts, micros: Sequence[Any]) -> Iterator[Hypothesis]:
    """Yield weights by samples or by tokens with their padding, instead of the units."""
    leaves = [[leaf.value for leaf in flatten(micro)[0]] for micro in micros]
    tensors = [[v for v in one if isinstance(v, Tensor) and v.dim() > 0] for one in leaves]
    tokens = [[v for v in one if v.dim() > 1 and not v.is_floating_point()] for one in tensors]
    counts: dict[str, list[float]] = {}
    if all(tensors):
        counts["samples"] = [float(len(one[0])) for one in tensors]
    if all(tokens):
        counts["tokens, with padding"] = [float(one[-1].shape[:2].numel()) for one in tokens]
    sums = parts.weighted(parts.units)
    for name, counted in counts.items():
        if not largest_over_ranks(counted != list(parts.units)):
            continue
        wrong = {f"sums divided by {name}": sums}
        if largest_over_ranks(len(set(counted)) > 1):  # else it is a mean of means
            wrong[f"mean losses weighed by {name}"] = parts.weighted(counted)
        local = sum(counted)
        everywhere = float(sum_over_ranks(torch.tensor([local], dtype=torch.float64)))
        for variant, gradient in wrong.items():
            averaged = (parts.clip(parts.average(gradient / local)),)
            yield Hypothesis("other-units", variant, averaged)
            together = (parts.clip(sum_over_ranks(gradient) / everywhere),)
            yield Hypothesis("other-units", f"{variant} of all ranks", together)


def _clipped_early(parts: WindowParts) -> Iterator[Hypothesis]:
    """Yield clipping before the last backward, and before the division."""
    key, weightings = "clipped-too-early", parts.weightings()
    for variant, weights in weightings.items():
        before, last = parts.weighted([*weights[:-1], 0.0]), parts.means[-1] * weights[-1]
        averaged = parts.average(parts.clip(before) + last)
        yield Hypothesis(key, f"{variant}, before the last backward", (averaged,))
    divisors = {
        "sums": (sum(parts.units), parts.units_everywhere / world_size()),
        "mean losses": (parts.count, parts.nominal),
    }
    for variant, by in divisors.items():
        clipped = parts.clip(parts.average(parts.weighted(weightings[variant])))
        for divisor in by:
            yield Hypothesis(key, f"{variant}, before dividing", (clipped / divisor,))


def _clipped_each(parts: WindowParts) -> Iterator[Hypothesis]:
    """Yield clipping after every backward: the running sum, or each micro-batch's gradient."""
    key, count, total = "clipped-per-micro-batch", parts.count, sum(parts.units)
    for variant, weights in parts.weightings().items():
        running = torch.zeros_like(parts.right)
        alone = torch.zeros_like(parts.right)
        for mean, weight in zip(parts.means, weights, strict=True):
            running = parts.clip(running + mean * weight)
            alone = alone + parts.clip(mean * weight)
        for how, gradient in (("running sum of", running), ("each of", alone)):
            named, averaged = f"{how} {variant}", parts.average(gradient)
            yield Hypothesis(key, named, (averaged,))
            yield Hypothesis(key, f"{named}, then divided by {count}", (averaged / count,))
            yield Hypothesis(key, f"{named}, then by the units", (averaged / total,))
        once_more = f"each of {variant}, and once more"
        yield Hypothesis(key, once_more, (parts.clip(averaged),))
        divided = f"each of {variant}, divided by {count} and once more"
        yield Hypothesis(key, divided, (parts.clip(averaged / count),))


def _stepped(
    runs: ModelRuns, micros: Sequence[Any], parts: WindowParts, seen: Sequence[SeenStep]
) -> Iterator[Hypothesis]:
    """Yield the mistake with a step for every micro-batch; gradients are cleared, or never."""
    weightings = parts.weightings()
    # Of equally good fits the first is named: begin with what is most often written.
    for variant in sorted(weightings, key=lambda name: name != "mean losses"):
        for cleared in (True, False):
            steps = _steps(runs, micros, parts, seen, weightings[variant], cleared=cleared)
            left = "" if cleared else ", gradients never cleared"
            yield Hypothesis("stepped-every-micro-batch", variant + left, tuple(steps))


def _steps(
    runs: ModelRuns,
    micros: Sequence[Any],
    parts: WindowParts,
    seen: Sequence[SeenStep],
    weights: Sequence[float],
    *,
    cleared: bool,
) -> Iterator[Tensor]:
    """Train with a step for every micro-batch, and yield what each step saw."""
    runs.begin()
    held = torch.zeros_like(parts.right)
    for micro, weight, step in zip(micros, weights, seen, strict=True):
        gradient, counted = runs.gradient_of(micro, from_start=False)
        scale = weight / (counted[0] or 1.0)
        held = parts.clip(held + parts.average(flat(gradient, runs.parameters) * scale))
        yield held
        _step(runs, held, step.groups)
        runs.optimizer.zero_grad()
        if cleared:
            held = torch.zeros_like(held)


def _update_of(runs: ModelRuns, gradient: Tensor, groups: Sequence[dict[str, Any]]) -> Tensor:
    """Return the update that the optimizer makes of a gradient, with the loop's settings."""
    runs.begin()
    with WindowObserver(runs.model, runs.parameters) as observer:
        _step(runs, gradient, groups)
        return flat(observer.run(runs.start).update, runs.parameters)


def _step(runs: ModelRuns, gradient: Tensor, groups: Sequence[dict[str, Any]]) -> None:
    """Step on a flat gradient, with the settings of these parameter groups if there are any."""
    parts = gradient.split([parameter.numel() for parameter in runs.parameters])
    for parameter, part in zip(runs.parameters, parts, strict=True):
        parameter.grad = part.view(parameter.shape).to(parameter.device, parameter.dtype)
    optimizer = runs.optimizer
    if len(groups) == len(optimizer.param_groups):
        for group, seen in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in seen.items() if name in group})
    optimizer.step()


# -------------------------------------------------------------------- flat gradients


def flat(tensors: Vectors, like: Sequence[Tensor]) -> Tensor:
    """Return all gradients one after the other, in float64; None is zero."""
    return torch.cat(
        [
            torch.zeros(p.numel(), dtype=torch.float64)
            if t is None
            else t.detach().to("cpu", torch.float64).flatten()
            for t, p in zip(tensors, like, strict=True)
        ]
    )


def apart(ours: Tensor, right: Tensor) -> float:
    """Return the relative distance of two flat gradients."""
    return distance([ours], [right])


def _steps_apart(observed: Sequence[Tensor], guessed: Sequence[Tensor]) -> float:
    if len(observed) != len(guessed):
        # Not the same number of steps: as far apart as nothing is from something.
        return math.inf if len(guessed) > 1 or len(observed) > 1 else 1.0
    return apart(torch.cat(list(observed)), torch.cat(list(guessed)))
