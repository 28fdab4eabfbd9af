"""A loss that is divided by the number of steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

from wholebatch.audit.check import Answer, Check, MicroBatch, Warned
from wholebatch.coupled.last_reduction import Reduction, without_units
from wholebatch.losses.loss import Units

_CLOSE = 4e-3  # one step of bfloat16: a factor may have been rounded to it


class DividedBySteps(Check):
    """A loss that is divided by the number of steps.

    Finds: a loss that is divided by the number of micro-batches of its window, or multiplied by its
    inverse.

    Costs: the walk of `SumOrMean`.

    Likely: it is left over from a loop that averaged over its steps, or it is a weight.

    Cannot see: another factor (`loss * 2 / 8`); a division by a tensor of several numbers; a sum
    divided by a number that is also a size of what it sums.
    """

    def __init__(self) -> None:
        self._losses: list[tuple[Sequence[Reduction], Units | None]] = []

    def micro_batch(self, micro: MicroBatch) -> Answer:
        self._losses.append((micro.reductions, None if micro.is_mean else micro.units))
        return self._division(micro.steps)

    def close(self, micro_batches: int) -> Answer:
        answer = self._division([micro_batches])  # which may not have been known before
        self._losses.clear()
        return answer

    def _division(self, steps: Collection[int]) -> Answer:
        warnings = (step_division(terms, units, steps) for terms, units in self._losses)
        first = next((warning for warning in warnings if warning is not None), None)
        return None if first is None else Warned(first)


def step_division(
    terms: Sequence[Reduction], units: Units | None, steps: Collection[int]
) -> str | None:
    """Return a warning of a loss that is scaled by 1 / (number of steps), or None.

    `terms` are the `last_reductions` of a loss, `steps` the numbers that it may be. A division by
    exactly this number is likely left over from a loop that averaged over its steps, but it may be
    a weight (the square of a temperature of 2, in 4 steps). A sum is looked at if the loss is given
    as a sum over `units` (None: as a mean).
    """
    mean = None if units is None else without_units(terms, float(units))
    if mean is not None:
        terms, units = mean, None
    for number in sorted(set(steps)):
        scales = {_scale_by(term, number, units) for term in terms}
        if number < 2 or not scales or None in scales:
            continue
        what = "multiplied by 1 /" if "by the inverse" in scales else "divided by"
        begin = f"this loss is {what} {number}"
        return (
            f"{begin}, and {number} is the number of steps. If that is left over from a loop that "
            "averaged over its steps, remove it: the window divides by its units. If it is a "
            "weight, nothing is wrong; "
            f'warnings.filterwarnings("ignore", "{begin}") silences this warning'
        )
    return None


def _scale_by(
    term: Reduction, number: int, units: Units | None
) -> Literal["of a mean", "of a sum", "by the inverse"] | None:
    """Return how a term is scaled by 1 / number."""
    scaled: Literal["of a mean", "of a sum", "by the inverse"] | None = None
    for place, scale in enumerate(term.scales):
        below = term.scales[place + 1 :]
        divided_below = any(inner.operation == "divided" for inner in below)
        if scale.operation == "multiplied" and _close(scale.by * number, 1.0):
            scaled = scaled or "by the inverse"
        if scale.operation == "multiplied" or not _close(scale.by, number):
            continue
        if any(inner.operation == "multiplied" and inner.by > 1 for inner in below):
            continue  # mean * count / number: a sum, divided by the features of a sample
        if term.kind == "mean" or (term.kind == "sum" and divided_below):
            return "of a mean"
        divided_above = any(inner.operation == "divided" for inner in term.scales[:place])
        # A sum over labels has no features that it may be divided by. Any other vector over its
        # own length, which is also its units, is a mean, for one.
        is_label = term.node.startswith("NllLoss")
        is_vector = is_label or (len(term.sizes) == 1 and _close(number, float(units or 0)))
        if units is not None and is_vector and place == 0:
            scaled = "of a sum"
            continue
        is_a_size = any(_close(number, size) for size in (*term.sizes, term.count))
        if term.kind == "sum" and divided_above and not is_a_size:
            return "of a mean"  # sum / steps / units
        if units is not None and place == 0 and not (is_a_size or _close(number, float(units))):
            scaled = "of a sum"
    return scaled


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_CLOSE)
