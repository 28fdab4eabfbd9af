"""Tell a mean that is given as a sum, from the last reductions of its graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wholebatch.audit.finding import AuditFinding
from wholebatch.coupled.last_reduction import Reduction


def sum_or_mean(
    reductions: Sequence[Reduction], units: float, is_mean: bool
) -> AuditFinding | None:
    """Find a mean that is given as a sum, or a sum that is given as a mean (`is_mean`)."""
    terms = [term for term in reductions if term.count > 1 or not term.sizes]
    if not is_mean and reductions and all(_is_by_weight(term, units) for term in reductions):
        terms = list(reductions)
    elif len(reductions) == units > 2:  # one of each unit, which a loop over the samples adds up
        # A loss of as many features may be divided by these.
        terms = [term for term in reductions if _is_divided_by(term, units) and term.count != units]
        if len(terms) < units:
            return None
    # One unit may be a sample, whose loss is a mean over its parts: `MeanAsOneUnit` warns.
    elif units <= 1 or not terms or len(terms) >= units:
        return None
    first, number = terms[0], f"{units:g}"
    weighted = [term for term in terms if _is_weighted(term)]
    if len(weighted) < len(terms) and not any(_is_made_a_sum(term, units) for term in weighted):
        weighted = []  # means beside weighted means: ten times a gradient penalty
    if not is_mean and not weighted and all(_is_mean(term, units) for term in terms):
        is_whole = first.kind == "mean" and len(terms) < units
        what = "a mean" if is_whole else f"a mean, a sum divided by {number}"
        text = (
            f"total is {what}, and must be the sum over its units={number}: its "
            'gradient would be too small. Take the sum (reduction="sum" in torch\'s losses), or '
            f"say that it is a mean: backward(mean=..., units={_over(first, units)})"
        )
        return AuditFinding("the loss", first.function, "mean", text)
    if is_mean and all(map(_is_summed_loss, terms)):
        text = (
            f"mean is a sum, and must be the mean over its units={number}: its "
            f"gradient would be too large. Pass it as a sum, backward(total, units={number}), or "
            "take the mean"
        )
        return AuditFinding("the loss", first.function, "sum", text)
    return None


def _is_weighted(term: Reduction) -> bool:
    """True for a term with a factor above 1, which may make a mean a sum again."""
    return any(scale.operation == "multiplied" and scale.by > 1 for scale in term.scales)


def _is_made_a_sum(term: Reduction, units: float) -> bool:
    """True if a factor is the number of units, or of what was reduced, or a multiple of these."""
    factors = (scale.by for scale in term.scales if scale.operation == "multiplied")
    sizes = {units, *map(float, term.sizes), float(term.count)} - {0.0, 1.0}
    ratios = (by / size for by in factors for size in sizes)
    return any(math.isclose(ratio, round(ratio), rel_tol=4e-3) for ratio in ratios if ratio > 0.9)


def _is_mean(term: Reduction, units: float) -> bool:
    """True for a mean, or a sum divided by its units."""
    # Of [units, units] losses, the division may be by the features; by 2, it may be of two terms.
    is_divided = units > 2 and term.count != units * units and _is_divided_by(term, units)
    return term.kind == "mean" or (term.kind == "sum" and is_divided)


def _is_divided_by(term: Reduction, units: float) -> bool:
    return any(math.isclose(scale.by, units, rel_tol=4e-3) for scale in term.scales)


def _is_by_weight(term: Reduction, units: float) -> bool:
    """True for a mean over one label, or several, that is divided by the sum of their weights."""
    labels = term.labels
    return (
        labels is not None
        and not term.scales
        and math.isclose(labels, units, rel_tol=4e-3)
        and not math.isclose(labels, 1.0, rel_tol=4e-3)
    )


def _over(term: Reduction, units: float) -> str:
    """Return what a mean is over, as the advice gives it."""
    if term.labels is None or term.labels == units:
        return f"{units:g}"
    return f"{term.labels:g}), which is what it is a mean over (not {units:g}"


def _is_summed_loss(term: Reduction) -> bool:
    """True for a plain sum by one of torch's loss functions; other sums may be weighted means."""
    return term.kind == "sum" and not term.node.startswith("Sum") and not term.scales
