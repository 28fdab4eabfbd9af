"""A loss that is divided by the number of steps."""

from __future__ import annotations

from collections.abc import Sequence

from wholebatch.checks.check import Answer, Check, MicroBatch, Refused, Warned
from wholebatch.coupled.last_reduction import Reduction, find_step_division
from wholebatch.errors import LossError
from wholebatch.losses.loss import Units


class DividedBySteps(Check):
    """A loss that is divided by the number of steps.

    Finds: a mean that is divided by the number of micro-batches of its window, a leftover of a loop
    that averaged over its steps; a sum so divided, and a product with the inverse.

    Costs: nothing beside the walk of `SumOrMean`, in the first window.

    Certain for a mean that is divided; likely for a sum and for a product, which may be a weight.

    Cannot see: another factor (`loss * 2 / 8`); a division by a tensor of several numbers.
    """

    def __init__(self) -> None:
        self._losses: list[tuple[Sequence[Reduction], Units | None]] = []
        self._has_warned = False

    def micro_batch(self, micro: MicroBatch) -> Answer:
        self._losses.append((micro.reductions, None if micro.is_mean else micro.units))
        return self._division(micro.steps)

    def close(self, micro_batches: int) -> Answer:
        answer = self._division(micro_batches)  # which may not have been known before
        self._losses.clear()
        return answer

    def _division(self, steps: int) -> Answer:
        for terms, units in self._losses:
            division = find_step_division(terms, units, [steps])
            if division is not None and division.is_sure:
                return Refused(LossError, f"{division.message} (audit=False: leave this check out)")
            if division is not None and not self._has_warned:
                self._has_warned = True
                return Warned(division.message)
        return None
