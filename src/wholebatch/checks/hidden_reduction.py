"""A loss whose reduction no graph shows."""

from __future__ import annotations

from wholebatch.checks.check import Answer, Check, MicroBatch, Warned, silenced


class HiddenReduction(Check):
    """A loss whose reduction no graph shows.

    Finds: over several units, `total` that comes out of a custom or compiled function, so that no
    other check sees if it is a sum.

    Costs: the walk of `SumOrMean`.

    Likely: most such losses are means.

    Cannot see: what the function computes.
    """

    def micro_batch(self, micro: MicroBatch) -> Answer:
        terms = micro.reductions
        if micro.is_mean or micro.number <= 1 or not terms:
            return None
        if any(term.kind != "hidden" or term.scales for term in terms):
            return None
        begin = f"total comes out of {terms[0].function}"
        return Warned(
            f"{begin}, a custom or compiled function that shows no graph, so it was not tested if "
            f"it is the sum over units={micro.number:g}. If it is their mean, pass "
            "backward(mean=..., units=n); wb.verify compares whole updates, and acc.run tests the "
            f"loss function itself. If it is the sum, nothing is wrong; {silenced(begin)}"
        )
