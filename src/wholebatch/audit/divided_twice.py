"""A sum that the loop divides by the units of the whole window."""

from __future__ import annotations

import math
from collections.abc import Iterable

from wholebatch.audit.check import Check, LossOfMicroBatch, silenced


class DividedTwice(Check):
    """A sum that the loop divides by the units of the whole window.

    Finds: totals that are all divided by one number, which is the sum of the window's units.

    Costs: the walk of `OwnReduction`.

    Warns: the window divides by its units, too. The number may be a weight.

    Cannot see: the units of other ranks; a division before the sum.
    """

    windows = "1, 2, 4, 8, …"

    def __init__(self) -> None:
        self._units: list[float] = []
        self._divisors: list[set[float]] = []

    def loss_is_known(self, micro: LossOfMicroBatch) -> Iterable[str]:
        self._units.append(micro.number)
        sums = [] if micro.is_mean else [part for part in micro.parts if part.kind == "sum"]
        self._divisors.append({1 / factor for part in sums for factor in part.factors if factor})
        return ()

    def window_closes(self) -> Iterable[str]:
        units, divisors = math.fsum(self._units), self._divisors
        self._units, self._divisors = [], []
        if len(divisors) < 2 or not all(
            any(math.isclose(number, units, rel_tol=1e-5) for number in each) for each in divisors
        ):
            return []
        begin = f"the losses of this window are divided by {units:g}"
        return [
            f"{begin}, which is the number of its units: divided twice? The window divides by its "
            "units. Give the sums without the division, or each as a mean over its own units. If "
            f"the number is a weight, nothing is wrong; {silenced(begin)}"
        ]
