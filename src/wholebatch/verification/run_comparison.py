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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wholebatch.verification.model_runs import Bench
from wholebatch.verification.observed_window import Run

__all__ = [
    "Comparison",
    "Line",
    "Vectors",
    "compare",
    "distance",
    "gradients",
    "norm_of",
    "roundoff",
    "updates",
]


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


_NOISE = 0.1
"""A gradient whose undivided batch is this far from itself in another order is rounding."""


def gradients(
    what: str,
    bench: Bench,
    ours: Run,
    whole: Run,
    others: Sequence[Run],
    *,
    more: Sequence[Vectors] = (),
) -> Comparison:
    """The gradients that the optimizer saw, for each parameter and in all.

    `others` are runs that are right too, and `more` right gradients: they measure the floor.
    """
    unit = bench.numbers.unit(bench.model)
    resolution = [
        0.0 if gradient is None else unit * norm_of(gradient) for gradient in whole.gradients
    ]
    return compare(
        what,
        bench.names,
        ours.gradients,
        whole.gradients,
        also_right=[*(run.gradients for run in others), *more],
        resolution=resolution,
        unit=unit,
        devices=bench.devices,
    )


def updates(
    bench: Bench, ours: Run, whole: Run, others: Sequence[Run], gradient: Comparison
) -> tuple[Comparison, list[str]]:
    """What the optimizer did, in all; with notes where rounding is the optimizer's own."""
    # Adam divides by the gradient's own size: of a gradient that is nothing but rounding (a bias
    # before a normalisation) it makes an arbitrary update, for the undivided batch too.
    kept = [i for i, line in enumerate(gradient.lines) if line.differs or line.floor < _NOISE]
    left_out = [line.name for i, line in enumerate(gradient.lines) if i not in kept]
    # An update is added to the parameter: what the sum rounds away cannot be seen.
    resolution = [
        math.hypot(
            roundoff(bench.parameters[i].dtype) * norm_of(bench.start.before(bench.parameters[i])),
            gradient.floor * norm_of(whole.update[i]),
        )
        for i in kept
    ]
    devices = [bench.devices[i] for i in kept]

    def of(run: Run) -> list[Tensor]:
        return [run.update[i] for i in kept]

    found = compare(
        "update",
        [bench.names[i] for i in kept],
        of(ours),
        of(whole),
        also_right=[of(run) for run in others],
        resolution=resolution,
        unit=bench.numbers.unit(bench.model),
        devices=devices,
        judged_by_line=False,
    )
    notes = []
    if left_out and distance(ours.update, whole.update, bench.devices) > found.tolerance:
        shown = ", ".join(left_out[:4]) + (f" and {len(left_out) - 4} more" if left_out[4:] else "")
        notes.append(
            f"the gradient of {shown} is zero but for rounding, so what the optimizer makes of it "
            "is arbitrary for the undivided batch too: left out of the update's distance"
        )
    if found.same or not gradient.same:
        return found, notes
    # The same with single numbers of a gradient. If the optimizer makes this very update of the
    # gradient that it saw, nothing else is in it.
    own = distance(of(ours), of(bench.replayed(ours)), devices)
    size = math.hypot(*map(norm_of, of(whole)))
    if own > 10 * (found.floor + (math.hypot(*resolution) / size if size else 0.0)):
        return found, notes
    notes.append(
        f"the update is {said(found.distance)} off because the optimizer divides by numbers that "
        "are rounding themselves; of the gradient it saw, it made the right update"
    )
    return replace(found, tolerance=max(found.tolerance, found.distance)), notes


def said(value: float) -> str:
    """
    >>> said(0.334), said(2.04e-7), said(0.0), said(7.3), said(731)
    ('33%', '2.0e-07', '0', '730%', '7.3e+02 times')
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return "infinitely far"
    if value >= 10:
        return f"{value:.2g} times"
    return (
        f"{float(f'{value:.2g}'):.0%}"
        if value >= 0.095
        else f"{value:.1e}"
        if value < 0.001
        else f"{value:.2%}"
    )
