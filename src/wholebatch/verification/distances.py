"""The distance between two runs, and the distance that rounding alone would explain.

Distances are relative, in the L2 norm: over all parameters together, and for each. The tolerance is
ten times the *floor*, and the floor is measured: how far the undivided batch comes from itself when
its samples are in another order, when it is run again, and (where float64 was run) how far it is
from float64. It is never below the resolution of the number format, since a measurement can be
zero by luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Vectors = Sequence[Tensor | None]
"""A tensor for each parameter; None is zero."""
TIMES_THE_FLOOR = 10.0


@dataclass(frozen=True)
class Line:
    """One parameter: its distance, the distance that rounding explains, and if that is exceeded."""

    name: str
    distance: float
    floor: float
    differs: bool


@dataclass(frozen=True)
class Comparison:
    """Gradients or updates of two runs; `same` if rounding explains the distance."""

    what: str
    distance: float
    floor: float
    tolerance: float
    lines: tuple[Line, ...] = ()
    """Of each parameter; none of an update, which is judged in all."""

    @property
    def same(self) -> bool:
        return self.distance <= self.tolerance and not self.differing

    @property
    def differing(self) -> tuple[Line, ...]:
        """Return the parameters that differ, the worst first."""
        return tuple(line for line in self.worst() if line.differs)

    def worst(self, number: int | None = None) -> list[Line]:
        """Return the parameters by how far they are beyond their floor."""
        ordered = sorted(
            self.lines,
            key=lambda line: (line.differs, line.distance / (line.floor or 1.0)),
            reverse=True,
        )
        return ordered[:number]


@dataclass(frozen=True)
class Scale:
    """The parameters that are compared: their names and devices, and one rounding of them."""

    names: Sequence[str]
    devices: Sequence[torch.device]
    unit: float

    def norms(self, ours: Vectors, other: Vectors | None = None) -> list[float]:
        """Return the norm of each tensor, or of its difference to `other`, in float64."""
        minus = [None] * len(ours) if other is None else other
        return [
            norm_of(*(None if tensor is None else tensor.to(device) for tensor in pair))
            for *pair, device in zip(ours, minus, self.devices, strict=True)
        ]

    def distance(self, ours: Vectors, reference: Vectors) -> float:
        """Return the relative distance over all parameters together."""
        off = math.hypot(*self.norms(ours, reference))
        return ratio(off, math.hypot(*self.norms(reference)))

    def compare(
        self,
        what: str,
        ours: Vectors,
        reference: Vectors,
        also_right: Sequence[Vectors],
        *,
        resolution: Sequence[float] = (),
    ) -> Comparison:
        """Compare `ours` with `reference`; the floor is how far those `also_right` are from it.

        `resolution` is, for each parameter, the norm below which a difference is no difference:
        one rounding, or that of the parameter that an update is added to.
        """
        sizes, errors = self.norms(reference), self.norms(ours, reference)
        resolution = resolution or [self.unit * size for size in sizes]
        floors = [resolution, *(self.norms(other, reference) for other in also_right)]
        all_size = math.hypot(*sizes)
        # A gradient that is zero but for rounding (a bias before a normalisation) has no relative
        # error to speak of: what rounding of all of it hides does not count in one parameter.
        noise = TIMES_THE_FLOOR * self.unit * all_size
        lines = []
        for name, error, size, *others in zip(self.names, errors, sizes, *floors, strict=True):
            differs = not error <= max(TIMES_THE_FLOOR * max(others), noise)
            lines.append(Line(name, ratio(error, size), ratio(max(others), size), differs))
        floor = ratio(max(math.hypot(*row) for row in floors), all_size)
        # The floor is capped at the root of the resolution: a larger one cannot be rounding.
        floor = min(floor, math.sqrt(self.unit) / TIMES_THE_FLOOR)
        off = ratio(math.hypot(*errors), all_size)
        return Comparison(what, off, floor, TIMES_THE_FLOOR * floor, tuple(lines))


def ratio(above: float, below: float) -> float:
    """Return a quotient; of zero by zero 0, of anything else by zero infinity."""
    if below > 0:
        return above / below
    return 0.0 if above == 0 else math.inf


def norm_of(tensor: Tensor | None, minus: Tensor | None = None) -> float:
    """Return the L2 norm of a tensor, or of its difference to another; None is zero."""
    wide = [
        operand.to(torch.complex128 if operand.is_complex() else torch.float64)
        for operand in (tensor, minus)
        if operand is not None
    ]
    if not wide:
        return 0.0
    return float(torch.linalg.vector_norm(wide[0] - wide[1] if len(wide) > 1 else wide[0]))


# ------------------------------------------------------------------- of rows of numbers


def apart(ours: Tensor, right: Tensor) -> float:
    """Return the relative distance of two rows."""
    return ratio(norm_of(ours, right), norm_of(right))


def parallel(ours: Tensor, other: Tensor, tolerance: float) -> bool:
    """True if one row is the other times a positive number."""
    size = float(other @ other)
    factor = float(ours @ other) / size if size else 0.0
    return factor > 0 and apart(ours, other * factor) <= tolerance


def fit_of(parts: Sequence[Tensor], whole: Tensor) -> tuple[list[float], float]:
    """Fit a row by others in least squares; return their weights, and the share that is left."""
    count = len(parts)
    rows = torch.stack([*parts, whole]).double()
    gram = rows @ rows.T
    if not bool(torch.isfinite(gram).all()):
        return [1.0] * count, 0.0  # overflowed: nothing can be said about the weights
    inner, right, size = gram[:count, :count], gram[:count, count], gram[count, count]
    weights = torch.linalg.lstsq(inner, right, driver="gelsd").solution
    left = size - 2 * weights @ right + weights @ inner @ weights
    relative = float((left.clamp_min(0.0) / size).sqrt()) if size > 0 else 0.0
    return [float(weight) for weight in weights], relative
