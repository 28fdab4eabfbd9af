"""Holds the runs of a proof against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wholebatch.proof.bench import Bench
from wholebatch.proof.compare import Comparison, Vectors, compare, distance, roundoff
from wholebatch.proof.observe import Run
from wholebatch.proof.verdict import said

__all__ = ["gradients", "updates"]


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
        0.0 if gradient is None else unit * _norm(gradient) for gradient in whole.gradients
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
) -> tuple[Comparison, str | None]:
    """What the optimizer did, in all; with a note where rounding is the optimizer's own."""
    # An update is added to the parameter: what the sum rounds away cannot be seen.
    resolution = [
        math.hypot(roundoff(p.dtype) * _norm(bench.start.before(p)), gradient.floor * _norm(moved))
        for p, moved in zip(bench.parameters, whole.update, strict=True)
    ]
    found = compare(
        "update",
        bench.names,
        ours.update,
        whole.update,
        also_right=[run.update for run in others],
        resolution=resolution,
        unit=bench.numbers.unit(bench.model),
        devices=bench.devices,
        judged_by_line=False,
    )
    if found.same or not gradient.same:
        return found, None
    # Adam divides by the gradient's own size: where that is rounding, so is the update. If the
    # optimizer makes this very update of the gradient that it saw, nothing else is in it.
    own = distance(ours.update, bench.replayed(ours).update, bench.devices)
    size = math.hypot(*map(_norm, whole.update))
    if own > 10 * (found.floor + (math.hypot(*resolution) / size if size else 0.0)):
        return found, None
    note = (
        f"the update is {said(found.distance)} off because the optimizer divides by gradients that "
        "are rounding themselves; of the gradient it saw, it made the right update"
    )
    return replace(found, tolerance=max(found.tolerance, found.distance)), note


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
