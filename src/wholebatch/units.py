"""Counting the units of a batch before its first backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from wholebatch.close import read_scalars
from wholebatch.errors import LossError
from wholebatch.loss import Units, check_units

__all__ = ["SINGLE", "UnitsFunction", "count_units"]

SINGLE = "loss"
"""The name under which a loss without named terms is kept."""

UnitsFunction: TypeAlias = Callable[[Any], Units | Mapping[str, Units]]


def count_units(units: UnitsFunction, micros: Sequence[Any]) -> dict[str, float]:
    """The units of all micro-batches, by term; a plain number counts the one unnamed term."""
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
    return {name: math.fsum(read_scalars(values)) for name, values in counts.items()}
