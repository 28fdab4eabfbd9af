"""Compare the units of means with what they are means over, which the graph of a loss tells."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wholebatch.coupled.last_reduction import Reduction, last_reductions, without_units
from wholebatch.errors import LossError
from wholebatch.losses.loss import Loss, Terms, terms_of
from wholebatch.warn_user import warn_user

_CLOSE = 1e-2  # a number of labels may have been rounded to bfloat16


class MeanUnits:
    """Refuses means of a window whose units do not follow what they are means over.

    A mean over 4 labels and one over 7 must have units in the proportion 4 : 7. Units of 8 and 8
    are those of a loop that counts the ignored labels, too. Means over equally many are not judged:
    one may be a penalty of the weights.
    """

    def __init__(self) -> None:
        self._warned = False
        self.begin_window()

    def begin_window(self) -> None:
        """Forget the means of the window before."""
        self._first: dict[tuple[int, int, int, str], tuple[float, float]] = {}
        self.end_micro_batch()

    def end_micro_batch(self) -> None:
        """Begin to count the backwards of the next micro-batch."""
        self._backwards = 0

    def add(self, terms: Sequence[Reduction], units: float) -> None:
        """Compare the terms of a mean over `units` with those of the window's first micro-batch."""
        for place, term in enumerate(terms):
            over = term.divisor
            if not over or not math.isfinite(over) or units <= 0 or _is_by_sample(term, units):
                continue
            key = (self._backwards, len(terms), place, term.node)
            first, first_units = self._first.setdefault(key, (over, units))
            proportional = math.isclose(over * first_units, first * units, rel_tol=_CLOSE)
            # Of labels that are ignored, as many may be left by chance.
            ignores = term.labels is not None and term.labels < term.count
            if proportional or (over == first and not ignores):
                continue
            if units == first_units == 1:
                self._warn(first, over)
            else:
                raise LossError(_text(term, (first, first_units), (over, units)))
        self._backwards += 1

    def add_loss(self, loss: Loss | Terms) -> None:
        """Compare the means among the terms of a loss; then the next micro-batch begins."""
        for term in terms_of(loss).values():
            reductions, units = last_reductions(term.total), float(term.units)
            mean = without_units(reductions, units)
            if mean is not None:
                self.add(mean, units)
        self.end_micro_batch()

    def _warn(self, first: float, over: float) -> None:
        """Warn, once, of means over different numbers that are one unit each."""
        if not self._warned:
            self._warned = True
            warn_user(
                f"micro-batches count the same: their losses are means over {first:g} and "
                f"{over:g}, and each has units=1. If the loss is a mean over samples or tokens, "
                "give their number as units=. If each micro-batch is one unit (one graph, one "
                'episode), nothing is wrong; warnings.filterwarnings("ignore", "micro-batches '
                'count the same") silences this warning'
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
