"""How far two runs are apart, and how far rounding alone would have brought them.

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

__all__ = ["Comparison", "Line", "Vectors", "compare", "distance", "norm_of", "roundoff"]

Vectors = Sequence[Tensor | None]

TIMES_THE_FLOOR = 10.0


@dataclass(frozen=True)
class Line:
    """One parameter: how far apart, what rounding explains, and whether that is too far."""

    name: str
    numbers: int
    distance: float
    floor: float
    differs: bool


@dataclass(frozen=True)
class Comparison:
    """Gradients or updates of two runs. `same` says whether rounding explains the distance."""

    what: str
    distance: float
    floor: float
    tolerance: float
    lines: tuple[Line, ...]
    judged_by_line: bool = True

    @property
    def same(self) -> bool:
        return self.distance <= self.tolerance and not self.differing

    @property
    def differing(self) -> tuple[Line, ...]:
        """The parameters that differ, the worst first."""
        if not self.judged_by_line:
            return ()
        return tuple(line for line in self.worst() if line.differs)

    def worst(self, number: int | None = None) -> list[Line]:
        """Parameters by how far they are beyond their floor."""
        ordered = sorted(
            self.lines,
            key=lambda line: (line.differs, line.distance / (line.floor or 1.0)),
            reverse=True,
        )
        return ordered[:number]


def roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: the relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def norm_of(tensor: Tensor) -> float:
    """The L2 norm, in float64."""
    return float(torch.linalg.vector_norm(_wide(tensor, tensor.device)))


def compare(
    what: str,
    names: Sequence[str],
    ours: Vectors,
    reference: Vectors,
    *,
    also_right: Sequence[Vectors],
    resolution: Sequence[float],
    unit: float,
    devices: Sequence[torch.device],
    judged_by_line: bool = True,
) -> Comparison:
    """Hold `ours` against `reference`; the floor is how far those `also_right` are from it.

    `resolution` is, for each parameter, the norm below which a difference is no difference
    (rounding of the format, or of the parameter that an update is added to).
    """
    sizes = _norms(reference, None, devices)
    errors = _norms(ours, reference, devices)
    floors = [_norms(other, reference, devices) for other in also_right]
    all_size = math.hypot(*sizes)
    # A gradient that is zero but for rounding (a bias before a normalisation) has no relative
    # error to speak of: what rounding of the whole gradient hides does not count in one parameter.
    noise = TIMES_THE_FLOOR * unit * all_size
    lines = []
    for index, name in enumerate(names):
        floor = max([resolution[index], *(one[index] for one in floors)])
        size = sizes[index]
        differs = errors[index] > TIMES_THE_FLOOR * floor and errors[index] > noise
        tensor = reference[index]
        tensor = ours[index] if tensor is None else tensor
        lines.append(
            Line(
                name=name,
                numbers=0 if tensor is None else tensor.numel(),
                distance=_ratio(errors[index], size),
                floor=_ratio(floor, size),
                differs=differs or not math.isfinite(errors[index]),
            )
        )
    floor = max([math.hypot(*resolution), *(math.hypot(*one) for one in floors)])
    # A floor beyond the root of the resolution is no rounding: it must not excuse anything.
    relative = min(_ratio(floor, all_size), math.sqrt(unit) / TIMES_THE_FLOOR)
    return Comparison(
        what=what,
        distance=_ratio(math.hypot(*errors), all_size),
        floor=relative,
        tolerance=TIMES_THE_FLOOR * relative,
        lines=tuple(lines),
        judged_by_line=judged_by_line,
    )


def distance(
    ours: Vectors, reference: Vectors, devices: Sequence[torch.device] | None = None
) -> float:
    """Relative L2 distance over all tensors together (`None` is zero)."""
    above = math.hypot(*_norms(ours, reference, devices))
    return _ratio(above, math.hypot(*_norms(reference, None, devices)))


def _norms(
    ours: Vectors, other: Vectors | None, devices: Sequence[torch.device] | None
) -> list[float]:
    """For each parameter the norm of `ours`, or of its difference to `other`, in float64."""
    result = []
    for index, tensor in enumerate(ours):
        minus = None if other is None else other[index]
        device = torch.device("cpu") if devices is None else devices[index]
        result.append(_norm(tensor, minus, device))
    return result


def _norm(tensor: Tensor | None, minus: Tensor | None, device: torch.device) -> float:
    if tensor is None and minus is None:
        return 0.0
    if tensor is None or minus is None:
        one = minus if tensor is None else tensor
        assert one is not None
        return float(torch.linalg.vector_norm(_wide(one, device)))
    return float(torch.linalg.vector_norm(_wide(tensor, device) - _wide(minus, device)))


def _wide(tensor: Tensor, device: torch.device) -> Tensor:
    tensor = tensor.to(device)
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _ratio(above: float, below: float) -> float:
    if below > 0:
        return above / below
    return 0.0 if above == 0 else math.inf
