"""Holds the runs of a proof against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from wholebatch.verification.observed_window import Run
from wholebatch.verification.run_distance import (
    Comparison,
    Vectors,
    compare,
    distance,
    norm_of,
    roundoff,
)
from wholebatch.verification.verdict import said
from wholebatch.verification.window_runs import Bench

__all__ = ["gradients", "updates"]

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
