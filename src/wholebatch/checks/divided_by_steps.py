"""A loss that is divided by the number of steps."""

from __future__ import annotations

from collections.abc import Sequence

from wholebatch.checks.check import Answer, Check, MicroBatch, Warned
from wholebatch.coupled.last_reduction import Reduction, step_division
from wholebatch.losses.loss import Units


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
        answer = self._division(micro_batches)  # which may not have been known before
        self._losses.clear()
        return answer

    def _division(self, steps: int) -> Answer:
        warnings = (step_division(terms, units, [steps]) for terms, units in self._losses)
        first = next((warning for warning in warnings if warning is not None), None)
        return None if first is None else Warned(first)
