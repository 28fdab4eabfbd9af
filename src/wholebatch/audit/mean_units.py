"""Means whose units do not follow what they are means over."""

from __future__ import annotations

import math
from collections.abc import Iterable

from wholebatch.audit.check import Check, LossOfMicroBatch, silenced
from wholebatch.audit.scalar_graph import Part, without_units


class UnitsOfMeans(Check):
    """Warn of means over numbers that are in another proportion than the units of their losses.

    Such as a mean over labels that counts ignored labels, too; or a sum of two means over other
    numbers. The micro-batches may be weighted on purpose (each graph or episode counts the same).
    """

    only_first = False

    def __init__(self) -> None:
        self._first: dict[tuple[int, int, str], tuple[float, float]] = {}
        """What each mean of the window's first loss is over, and its units."""

    def window_begins(self) -> None:
        self._first.clear()

    def loss_is_known(self, micro: LossOfMicroBatch) -> Iterable[str]:
        units = micro.number
        mean = micro.parts if micro.is_mean else without_units(micro.parts, units)
        means = [part for part in mean or () if part.divisor is not None]
        for place, part in enumerate(means):
            now = part.divisor or 0.0
            if not units or not math.isfinite(now) or _counts_samples(part, units):
                continue
            key = (len(means), place, part.function)
            first, first_units = self._first.setdefault(key, (now, units))
            # Means over equally many are not judged: one may be a penalty of the weights.
            ignores = part.function == "cross_entropy" and part.over < math.prod(part.sizes)
            is_judged = now != first or ignores
            if is_judged and not math.isclose(now * first_units, first * units, rel_tol=1e-2):
                return [_warning((first, first_units), (now, units), means)]
        return []


def _counts_samples(part: Part, units: float) -> bool:
    """True for a mean over all elements of as many samples: images of another size, for example."""
    is_all = part.kind == "mean" and part.over == math.prod(part.sizes)
    return is_all and part.sizes[:1] == (units,) != part.sizes


def _warning(first: tuple[float, float], now: tuple[float, float], means: list[Part]) -> str:
    begin = "the units of this loss do not follow what it is a mean over"
    advice = "Give as units= what the mean is over (for cross_entropy, the labels that count)"
    if len({part.divisor for part in means}) > 1:
        counts = " and ".join(f"{part.divisor:g}" for part in means)
        advice = (
            f"The loss adds means over {counts}, so no single units= is right: give each its own, "
            "wb.Loss.terms({name: (sum, units)}), after announce()"
        )
    return (
        f"{begin}: {first[0]:g} and {now[0]:g} in two micro-batches, with units= of {first[1]:g} "
        f"and {now[1]:g}. {advice}. If each micro-batch shall weigh so (one graph, one episode), "
        f"nothing is wrong; {silenced(begin)}"
    )
