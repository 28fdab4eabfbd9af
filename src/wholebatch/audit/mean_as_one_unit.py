"""A mean over several labels that is given as a sum over one unit."""

from __future__ import annotations

from wholebatch.audit.check import Answer, Check, MicroBatch, Warned, silenced
from wholebatch.coupled.last_reduction import Reduction


class MeanAsOneUnit(Check):
    """A mean over several numbers that is given as a sum over one unit.

    Finds: `total` with `units=1` whose last reduction is a mean over several labels, or over the
    rows of several samples.

    Costs: the walk of `SumOrMean`.

    Likely: all of it may be one sample.

    Cannot see: a mean that the graph does not show.
    """

    def micro_batch(self, micro: MicroBatch) -> Answer:
        terms = [term for term in micro.reductions if term.count > 1 or not term.sizes]
        if micro.number != 1 or micro.is_mean or not terms:
            return None
        if not all(map(_is_mean_of_several, terms)):
            return None
        begin = f"total is a mean over {_count(terms[0])}, and units=1 takes them as one"
        return Warned(
            f"{begin}. If this is a mean over the samples or labels of a micro-batch, pass their "
            "number: backward(mean=..., units=n). If all of it is one sample, nothing is wrong; "
            f"{silenced(begin)}"
        )


def _is_mean_of_several(term: Reduction) -> bool:
    """True for a mean over more than one label, or over rows of losses without labels."""
    if any(scale.operation == "multiplied" and scale.by > 1 for scale in term.scales):
        return False
    if term.labels is not None:
        return term.labels > 1
    return term.kind == "mean" and len(term.sizes) > 0 and term.sizes[0] > 1


def _count(term: Reduction) -> str:
    if term.labels is not None:
        return f"{term.labels:g} labels"
    return f"{term.count} numbers"
