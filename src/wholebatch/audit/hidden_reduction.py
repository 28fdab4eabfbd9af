"""A loss whose reduction no graph shows."""

from __future__ import annotations

import math

from wholebatch.audit.check import Answer, Check, MicroBatch, Warned, silenced
from wholebatch.coupled.last_reduction import Reduction


class HiddenReduction(Check):
    """A loss whose reduction no graph shows.

    Finds: over several units, `total` whose graph shows neither a mean nor a sum: it comes out of a
    custom or compiled function, or of numbers that were added in Python and divided.

    Costs: the walk of `SumOrMean`.

    Likely: many such losses are means.

    Cannot see: what the function computes; terms with different scales.
    """

    def micro_batch(self, micro: MicroBatch) -> Answer:
        terms, units = micro.reductions, micro.number
        if micro.is_mean or units <= 1 or not terms:
            return None
        if any(term.kind in ("mean", "sum") or _is_by(term, units) for term in terms):
            return None
        scales = {term.scales for term in terms}
        is_divided = any(scale.operation == "divided" for scale in terms[0].scales)
        is_hidden = all(term.kind == "hidden" for term in terms)
        if len(scales) > 1 or not (is_divided or is_hidden):  # each term has its own weight
            return None
        begin = f"total comes out of {terms[0].function}"
        return Warned(
            f"{begin}, and its graph does not show if it is the sum over units={units:g}. If it is "
            "their mean, pass backward(mean=..., units=n); wb.verify compares whole updates, and "
            "acc.run tests the loss function itself. If it is the sum, nothing is wrong; "
            f"{silenced(begin)}"
        )


def _is_by(term: Reduction, units: float) -> bool:
    """True for a mean that was multiplied by its units."""
    products = [scale.by for scale in term.scales if scale.operation == "multiplied"]
    return any(math.isclose(factor, units) for factor in products)
