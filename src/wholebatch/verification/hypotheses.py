"""Every hypothesis about one window, and how far each is from what was observed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.verification.batch_reading import Reading
from wholebatch.verification.loop_verdict import Fit
from wholebatch.verification.mistakes import RIGHT, Guess, Parts, flat, guesses, stepped_guesses
from wholebatch.verification.observed_window import Run, Seen, Watch
from wholebatch.verification.rank_values import any_rank, apart, largest, over_ranks
from wholebatch.verification.rejoined_batch import joined
from wholebatch.verification.run_distance import TIMES_THE_FLOOR
from wholebatch.verification.starting_state import Start
from wholebatch.verification.undivided_batch import ranks
from wholebatch.verification.window_runs import Bench

__all__ = ["always_active", "fits_of", "moved_otherwise", "parts_of"]


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
