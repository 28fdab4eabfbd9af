"""Means whose units do not follow what they are means over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from wholebatch.audit.check import Answer, Check, MicroBatch, Refused, Warned, silenced
from wholebatch.coupled.last_reduction import Reduction, without_units
from wholebatch.errors import LossError

_CLOSE = 1e-2  # a number of labels may have been rounded to bfloat16


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
        self.window_begins()

    def window_begins(self) -> Answer:
        # Each mean of the window's first micro-batch: what it is over, its units, and if these may
        # be its samples.
        self._first: dict[tuple[int, int, int, str], tuple[float, float, bool]] = {}
        self._backwards = 0  # of the micro-batch
        return None

    def micro_batch(self, micro: MicroBatch) -> Iterable[Answer]:
        mean = without_units(micro.reductions, micro.number)
        if micro.is_mean or mean is not None:
            yield from self._compare(mean or micro.reductions, micro.number)
            self._backwards += 1

    def addition(self) -> Answer:
        self._backwards = 0
        return None

    def _compare(self, terms: Sequence[Reduction], units: float) -> Iterable[Answer]:
        """Compare the terms of a mean with those of the window's first micro-batch.

        A mean over 4 labels and one over 7 must have units in the proportion 4 : 7. Means over
        equally many are not judged: one may be a penalty of the weights.
        """
        for place, term in enumerate(terms):
            over = term.divisor
            by_sample = _is_by_sample(term, units)
            if not over or not math.isfinite(over) or units <= 0 or (by_sample and units != 1):
                continue
            key = (self._backwards, len(terms), place, term.node)
            now = (over, units, by_sample)
            first, first_units, was_by_sample = self._first.setdefault(key, now)
            if by_sample and was_by_sample:
                continue
            proportional = math.isclose(over * first_units, first * units, rel_tol=_CLOSE)
            # Of labels that are ignored, as many may be left by chance.
            ignores = term.labels is not None and term.labels < term.count
            if proportional or (over == first and not ignores):
                continue
            if units != 1 or first_units != 1:
                yield Refused(LossError, _text(term, (first, first_units), (over, units)))
                continue
            begin = "micro-batches count the same"
            yield Warned(
                f"{begin}: their losses are means over {first:g} and {over:g}, and each has "
                "units=1. If the loss is a mean over samples or tokens, give their number as "
                "units=. If each micro-batch is one unit (one graph, one episode), nothing is "
                f"wrong; {silenced(begin)}"
            )


def _is_by_sample(term: Reduction, units: float) -> bool:
    """True for a mean over all elements of as many samples: images of another size, for example."""
    is_all = term.labels is None or term.labels == term.count
    return term.kind == "mean" and is_all and term.sizes[:1] == (units,) != term.sizes


def _text(term: Reduction, first: tuple[float, float], now: tuple[float, float]) -> str:
    counted, what = "elements", f"what {term.function} is a mean over"
    if term.kind == "sum":
        counted, what = "units", "what its sum is divided by"
    elif term.labels is not None and term.labels == int(term.labels) <= term.count:
        counted, what = "labels", f"{what}, (labels != -100).sum() of the labels that it gets"
    elif term.labels is not None:
        counted, what = "weights of labels", f"{what}, weight[labels].sum()"
    return (
        f"the mean of one micro-batch is over {first[0]:g} {counted}, and that of another over "
        f"{now[0]:g}, but their units= are {first[1]:g} and {now[1]:g}: the update would not be "
        f"that of the whole batch. Give as units= {what} (audit=False: leave this check out)"
    )
