"""The units of a window, counted before its first backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from wholebatch.distributed.process_group import Group
from wholebatch.errors import LossError
from wholebatch.losses.loss import SINGLE, Units, check_units
from wholebatch.window.close import read_scalars
from wholebatch.window.window import refuse_units

UnitsFunction: TypeAlias = Callable[[Any], Units | Mapping[str, Units]]


class UnitsCount:
    """Count all units of a window, by term, over the ranks too, before its first backward."""

    def __init__(self, units: UnitsFunction, group: Group) -> None:
        self._units = units
        self._group = group
        self._names = [SINGLE]

    def learn(self, like: Any) -> None:
        """Take the names of the terms from a batch that is not counted."""
        self._names = sorted(count_units(self._units, [like]))

    def __call__(self, micros: Sequence[Any]) -> dict[str, float]:
        counted = count_units(self._units, micros) or dict.fromkeys(self._names, 0.0)
        self._names = sorted(counted)
        sums = self._group.sum([counted[name] for name in self._names])
        return dict(zip(self._names, sums, strict=True))


def count_units(units: UnitsFunction, micros: Sequence[Any]) -> dict[str, float]:
    """Return the units of all micro-batches, by term; a number counts the unnamed term."""
    counts: dict[str, list[Units]] = {}
    for micro in micros:
        counted = units(micro)
        by_name = counted if isinstance(counted, Mapping) else {SINGLE: counted}
        if counts and by_name.keys() != counts.keys():
            raise LossError(
                f"units= counted the terms {sorted(by_name)} in one micro-batch and "
                f"{sorted(counts)} in another: return all terms for each, 0 where none"
            )
        for name, count in by_name.items():
            counts.setdefault(name, []).append(check_units(count))
    numbers = {name: read_scalars(values) for name, values in counts.items()}
    for values in numbers.values():
        refuse_units(values)
    return {name: math.fsum(values) for name, values in numbers.items()}
