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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wholebatch.readable_sizes import percent
from wholebatch.verification.model_runs import ModelRuns
from wholebatch.verification.observed_window import WindowRun

Vectors = Sequence[Tensor | None]

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
    lines: tuple[Line, ...]
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


def compare(
    what: str,
    runs: ModelRuns,
    ours: Vectors,
    reference: Vectors,
    also_right: Sequence[Vectors],
    *,
    resolution: Sequence[float] = (),
) -> Comparison:
    """Compare `ours` with `reference`; the floor is how far those `also_right` are from it.

    `resolution` is, for each parameter, the norm below which a difference is no difference: one
    rounding, or that of the parameter that an update is added to.
    """
    unit, devices = runs.unit, runs.devices
    sizes = _norms(reference, None, devices)
    errors = _norms(ours, reference, devices)
    resolution = resolution or [unit * size for size in sizes]
    floors = [_norms(other, reference, devices) for other in also_right]
    all_size = math.hypot(*sizes)
    # A gradient that is zero but for rounding (a bias before a normalisation) has no relative
    # error to speak of: what rounding of the whole gradient hides does not count in one parameter.
    noise = TIMES_THE_FLOOR * unit * all_size
    lines = []
    for index, (name, error, size) in enumerate(zip(runs.names, errors, sizes, strict=True)):
        floor = max([resolution[index], *(one[index] for one in floors)])
        differs = not error <= max(TIMES_THE_FLOOR * floor, noise)
        lines.append(Line(name, _ratio(error, size), _ratio(floor, size), differs))
    floor = max([math.hypot(*resolution), *(math.hypot(*one) for one in floors)])
    # The floor is capped at the root of the resolution: a larger one cannot be rounding.
    relative = min(_ratio(floor, all_size), math.sqrt(unit) / TIMES_THE_FLOOR)
    off = _ratio(math.hypot(*errors), all_size)
    return Comparison(what, off, relative, TIMES_THE_FLOOR * relative, tuple(lines))


def compare_updates(
    runs: ModelRuns,
    ours: WindowRun,
    whole: WindowRun,
    others: Sequence[WindowRun],
    gradient: Comparison,
) -> tuple[Comparison, list[str]]:
    """Compare what the optimizer did, in all; a note tells where the rounding is its own."""
    # An update is added to the parameter: what the sum rounds away cannot be seen. One rounding
    # is half the distance from 1 to the next number.
    resolution = [
        math.hypot(
            torch.finfo(p.dtype).eps / 2 * norm_of(runs.start.before(p)),
            gradient.floor * norm_of(change),
        )
        for p, change in zip(runs.parameters, whole.update, strict=True)
    ]
    also_right = [run.update for run in others]
    found = compare("update", runs, ours.update, whole.update, also_right, resolution=resolution)
    found = replace(found, lines=())
    if found.same or not gradient.same:
        return found, []
    # Adam divides by the gradient's own size: of numbers that are nothing but rounding it makes an
    # arbitrary update, for the undivided batch too. If the optimizer makes this very update of the
    # gradient that it saw, nothing else is in it.
    own = distance(ours.update, runs.replayed(ours).update, runs.devices)
    rounded = _ratio(math.hypot(*resolution), math.hypot(*map(norm_of, whole.update)))
    if own > TIMES_THE_FLOOR * (found.floor + (rounded if math.isfinite(rounded) else 0.0)):
        return found, []
    note = (
        f"the update is {percent(found.distance)} off because the optimizer divides by numbers of "
        "the size of rounding; from the gradient it got, it made the right update"
    )
    return replace(found, tolerance=max(found.tolerance, found.distance)), [note]


def distance(
    ours: Vectors, reference: Vectors, devices: Sequence[torch.device] | None = None
) -> float:
    """Return the relative L2 distance over all tensors together (`None` is zero)."""
    above = math.hypot(*_norms(ours, reference, devices))
    return _ratio(above, math.hypot(*_norms(reference, None, devices)))


def _norms(
    ours: Vectors, other: Vectors | None, devices: Sequence[torch.device] | None
) -> list[float]:
    """Return the norm of each tensor, or of its difference to `other`, in float64."""
    where = [torch.device("cpu")] * len(ours) if devices is None else devices
    minus = [None] * len(ours) if other is None else other
    return [
        norm_of(*(None if t is None else t.to(device) for t in pair))
        for *pair, device in zip(ours, minus, where, strict=True)
    ]


def fit_of(parts: Sequence[Vectors], whole: Vectors) -> tuple[list[float], float]:
    """Fit `whole` by `parts` in least squares; return the weights, and the share that is left."""
    count = len(parts)
    gram = torch.zeros(count + 1, count + 1, dtype=torch.float64)
    for tensors in zip(*parts, whole, strict=True):
        like = next((t for t in tensors if t is not None), None)
        if like is None:
            continue
        rows = torch.stack(
            [(torch.zeros_like(like) if t is None else t).double().flatten() for t in tensors]
        )
        gram += rows @ rows.T
    if not bool(torch.isfinite(gram).all()):
        return [1.0] * count, 0.0  # overflowed: nothing can be said about the weights
    inner, right, size = gram[:count, :count], gram[:count, count], gram[count, count]
    weights = torch.linalg.lstsq(inner, right, driver="gelsd").solution
    left = size - 2 * weights @ right + weights @ inner @ weights
    relative = float((left.clamp_min(0.0) / size).sqrt()) if size > 0 else 0.0
    return [float(weight) for weight in weights], relative


def norm_of(tensor: Tensor | None, minus: Tensor | None = None) -> float:
    """Return the L2 norm of a tensor, or of its difference to another; None is zero."""
    wide = [
        one.to(torch.complex128 if one.is_complex() else torch.float64)
        for one in (tensor, minus)
        if one is not None
    ]
    if not wide:
        return 0.0
    return float(torch.linalg.vector_norm(wide[0] - wide[1] if len(wide) > 1 else wide[0]))


def _ratio(above: float, below: float) -> float:
    if below > 0:
        return above / below
    return 0.0 if above == 0 else math.inf


def listed(names: Sequence[str]) -> str:
    """Return the first four names, and how many more there are."""
    shown = ", ".join(name or "the model itself" for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
