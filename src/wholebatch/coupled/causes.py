"""Why the loss of some samples is not that of their halves: named, with the way out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from wholebatch.coupled.finding import Finding
from wholebatch.coupled.rounding_tolerance import Tolerance
from wholebatch.coupled.sample_probe import FUNCTION, origins
from wholebatch.coupled.sample_runs import Few, Run, Uncheckable

__all__ = ["by_changing_a_sample", "couples", "of_gradient", "of_loss", "outside_norm"]

_COUPLES = (
    "Either it, or the model under it, compares samples or lets the batch decide something (a "
    "capacity, a path): what the loss does so belongs into wb.Coupled(encode, loss), which sees "
    "the whole batch. Or it is a mean over other units than those given"
)
_LAYER = (
    "output for one sample moved when another sample changed, for a reason its type does not tell: "
    "no micro-batch can give it the whole batch. If it calls F.batch_norm, make that an "
    "nn.BatchNorm inside it, which is exact; else compute it per sample, or move it into the loss "
    "of wb.Coupled(encode, loss), which sees the whole batch"
)
_LOSS = "(the loss function)"


def of_loss(few: Few, runs: Sequence[Run], tolerance: Tolerance, function: str) -> Finding:
    """Return why the totals of the whole and its halves do not add up, as far as numbers tell."""
    kind, text = _loss(few, runs, tolerance)
    return Finding(_LOSS, function, kind, text)


def of_gradient(few: Few, runs: Sequence[Run], tolerance: Tolerance, function: str) -> Finding:
    """Return why the gradients do not add up although the totals do."""
    gap = tolerance.gradient_gap(runs[0], runs[1:])
    assert gap is not None
    return Finding(_LOSS, function, "gradient", _gradient(few, tolerance, gap))


def couples(runs: Sequence[Run], function: str) -> Finding:
    """Return the finding that the loss couples its samples."""
    return Finding(_LOSS, function, "loss", _apart(runs))


def outside_norm(kind: str, function: str) -> Finding:
    """Return the finding of a BatchNorm in a module that the loss function runs by itself."""
    return Finding(
        _LOSS,
        function,
        "loss",
        f"runs a {kind} in training mode that is not in the model, so that nobody can make it "
        "exact: give all modules that it runs (model=[net, other]; loss(model, micro) is then "
        "given the list), or put that one into evaluation mode",
    )


def by_changing_a_sample(
    few: Few, count: int, function: str, known: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Return the modules whose output for one sample moves with another sample."""
    named = dict(few.model.named_modules())
    return tuple(
        Finding(name, function if name == FUNCTION else type(named[name]).__name__, "probe", _LAYER)
        for name in origins(few, count, known)
    )


def _loss(few: Few, runs: Sequence[Run], tolerance: Tolerance) -> tuple[str, str]:
    whole, first, second = runs
    if not all(run.is_finite for run in runs) or tolerance.adds_up(whole, [first, second]):
        return "loss", _apart(runs)
    seen = (
        f"the loss of {few.count} samples is {whole.total:.6g}, that of their halves "
        f"{first.total:.6g} and {second.total:.6g}"
    )
    if _is_mean(few, runs, tolerance):
        return "mean", (
            f"{seen}: a mean where a sum is expected. Give wb.mean_loss(mean, units), or compute "
            'it with reduction="sum" and give wb.Loss(total, units)'
        )
    if not tolerance.units_add_up(whole, [first, second]):
        return "units", (
            f"the units of {few.count} samples are {whole.units:.6g}, those of their halves "
            f"{first.units:.6g} and {second.units:.6g}: units must add up. Count what the total is "
            "a sum over in the micro-batch itself (samples, or labels that are not ignored)"
        )
    if _is_sum_times_units(runs, tolerance):
        return "sum", (
            f"{seen}: a sum given as a mean, so that it is multiplied by the units once more. Give "
            "wb.Loss(total, units) instead of wb.mean_loss"
        )
    added = _added_once(few, runs, tolerance)
    if added is not None:
        return "added", (
            f"{seen}: {added:.6g} is added once per micro-batch (a regulariser, a penalty on the "
            "weights), so that its share grows with their number. Multiply it by the "
            "micro-batch's units"
        )
    return "loss", _apart(runs)


def _apart(runs: Sequence[Run]) -> str:
    whole, first, second = runs
    mean = whole.total / (whole.units or math.nan)
    apart = (first.total + second.total) / (first.units + second.units or math.nan)
    gap = abs(mean - apart) / max(abs(mean), abs(apart), 1e-300)
    return (
        f"the loss of some samples is {mean:.6g}, of the same in two halves {apart:.6g} (relative "
        f"difference {gap:.0e}). {_COUPLES}{_other_units(runs)}"
    )


def _other_units(runs: Sequence[Run]) -> str:
    """Say that a mean may have other units, if it lies between the means of the halves."""
    if not all(run.units for run in runs):
        return ""
    whole, *halves = (run.total / run.units for run in runs)
    if not min(halves) < whole < max(halves):
        return ""
    return (
        ". If the loss is a mean, its units may be others than what it is the mean over (padding "
        "that is counted): count those"
    )


def _is_mean(few: Few, runs: Sequence[Run], tolerance: Tolerance) -> bool:
    """True if the total is the mean of the halves' totals, by units or by samples."""
    whole, first, second = runs
    size = max(abs(run.total) for run in runs)
    half = few.count // 2
    for a, b in ((first.units, second.units), (float(half), float(few.count - half))):
        mean = (first.total * a + second.total * b) / (a + b) if a + b else math.nan
        if math.isfinite(mean) and tolerance.near(whole.total, mean, size, 0.0):
            return True
    return False


def _is_sum_times_units(runs: Sequence[Run], tolerance: Tolerance) -> bool:
    """True if what adds up is total / units."""
    if not all(run.units for run in runs):
        return False
    whole, first, second = (run.total / run.units for run in runs)
    return tolerance.near(whole, first + second, max(abs(first) + abs(second), abs(whole)), 0.0)


def _added_once(few: Few, runs: Sequence[Run], tolerance: Tolerance) -> float | None:
    """Return what comes once more with every cut; None if it is another amount each time."""
    whole, first, second = runs
    half = few.count // 2
    once = first.total + second.total - whole.total
    try:
        if half < 2:
            return None
        quarters = [few.part(0, half // 2), few.part(half // 2, half)]
    except (torch.OutOfMemoryError, Uncheckable, RuntimeError, ValueError):
        return None
    again = math.fsum(quarter.total for quarter in quarters) - first.total
    size = max(abs(run.total) for run in runs) + abs(once)
    same = abs(once - again) <= 10 * tolerance.relative * abs(once) + tolerance.absolute
    return once if same and abs(once) > tolerance.relative * size else None


def _gradient(few: Few, tolerance: Tolerance, gap: tuple[int, float]) -> str:
    place, by = gap
    name = few.parameters[place][0]
    half = few.count // 2
    once = few.part(0, half, backward=True)
    quarter = few.part(0, half, backward=True, scale=0.25)
    why = (
        "The loss compares its samples by a statistic of them that is detached "
        "(losses / losses.detach().mean(): give wb.Coupled(encode, loss)); or a hook on a tensor "
        "or module, or the backward of an autograd.Function, mixes the samples or counts them; or "
        "a mean was multiplied by other units than it is a mean over"
    )
    if tolerance.gradient_gap(once, [quarter]) is not None:
        why = (
            "A backward from a quarter does not give a quarter: a hook on a tensor or module, or "
            "the backward of an autograd.Function, is not linear (it clips, normalises, or adds)"
        )
    return (
        f"the loss of {few.count} samples is that of their halves, its gradient is not: at "
        f"parameter {name} it differs by {by:.0e} of its norm. {why}. Do that once per update, on "
        "the whole gradient: a hook on the parameter (parameter.register_hook) runs so"
    )
