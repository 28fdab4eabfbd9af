"""Means whose units do not follow what they are means over."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from wholebatch.checks.check import Answer, Check, MicroBatch
from wholebatch.coupled.last_reduction import without_units
from wholebatch.coupled.mean_units import MeanUnits


class UnitsOfMeans(Check):
    """Means whose units do not follow what they are means over.

    Finds: two micro-batches whose means are over numbers in another proportion than their units: a
    mean over labels that counts ignored labels, too.

    Costs: the walk of `SumOrMean`.

    Certain, except for `units=1`, where a micro-batch may be one unit (one graph, one episode):
    likely.

    Cannot see: equally long micro-batches without ignored labels; the units of a sum; a divisor
    that the graph does not show.
    """

    windows = "1, 2, 4, 8, …"

    def __init__(self) -> None:
        self._means = MeanUnits()

    def window_begins(self, models: Sequence[nn.Module]) -> Answer:
        self._means.begin_window()
        return None

    def micro_batch(self, micro: MicroBatch) -> Answer:
        mean = without_units(micro.reductions, micro.number)
        if micro.is_mean or mean is not None:
            self._means.add(mean or micro.reductions, micro.number)
        return None

    def addition(self) -> Answer:
        self._means.end_micro_batch()
        return None
