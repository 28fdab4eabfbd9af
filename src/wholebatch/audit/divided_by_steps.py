"""A loss that is divided by the number of steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from wholebatch.audit.check import Check, LossOfMicroBatch, silenced
from wholebatch.audit.scalar_graph import Part


class DividedBySteps(Check):
    """Warn of a loss that is divided by the number of micro-batches of its window.

    It is left over from a loop that averaged over its steps, or it is a weight.
    """

    def loss_is_known(self, micro: LossOfMicroBatch) -> Iterable[str]:
        units = None if micro.is_mean else micro.number
        warning = step_division(micro.parts, units, micro.plan.steps)
        return [] if warning is None else [warning]


def step_division(parts: Sequence[Part], units: float | None, steps: Collection[int]) -> str | None:
    """Return a warning of a loss that is scaled by 1 / (number of steps), or None.

    `units` are those of a sum; None for a mean, whose own division is left out.
    """
    for number in sorted(set(steps) - {0, 1}):
        if parts and all(_is_divided(part, number, units) for part in parts):
            begin = f"this loss is divided by {number}"
            return (
                f"{begin}, and {number} is the number of steps. If that is left over from a loop "
                "that averaged over its steps, remove it: the window divides by its units. If it "
                f"is a weight, nothing is wrong; {silenced(begin)}"
            )
    return None


def _is_divided(part: Part, number: int, units: float | None) -> bool:
    """True if a part is divided by this number, which is neither its units nor a size of it."""
    if part.kind == "sum" and units is None:  # the innermost division makes it a mean
        part = replace(part, factors=part.factors[:-1])
    is_a_size = part.kind == "sum" and number in (units, *part.sizes, part.over)
    return part.is_divided_by(number) and not is_a_size
