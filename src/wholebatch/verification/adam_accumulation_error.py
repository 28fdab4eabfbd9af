"""Adam accumulation beside the undivided batch: what is exact, and how far the rest is off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from wholebatch.verification.model_runs import DividedBatch, ModelRuns
from wholebatch.verification.observed_window import StartingState
from wholebatch.verification.run_comparison import (
    Comparison,
    Vectors,
    compare,
    distance,
    norm_of,
    percent,
)
from wholebatch.verification.verdicts import Cause

__all__ = ["AdamAccumulationError", "adam_accumulation_error"]

_BEFORE = 3
"""Updates of the undivided batch before the one that is compared: the first of all, from moments
that are zero, has nothing to round."""


@dataclass(frozen=True)
class AdamAccumulationError:
    """One update of both; `cause` says in a sentence what was measured."""

    first_moment: Comparison
    update: Comparison
    losses: tuple[float | None, float | None]
    cause: Cause


def adam_accumulation_error(runs: ModelRuns, batch: DividedBatch) -> AdamAccumulationError:
    """Compare the undivided batch and its Adam accumulation in moments and update."""
    with _after_some_updates(runs, batch):
        whole = runs.whole(batch.whole)
        right_first, right_second = (_moments(runs, name) for name in ("exp_avg", "exp_avg_sq"))
        ours = runs.accumulated(batch)
        our_first, our_second = (_moments(runs, name) for name in ("exp_avg", "exp_avg_sq"))
    first = _compared("first moment", runs, our_first, right_first)
    update = _compared("update", runs, ours.update, whole.update)
    second = distance(our_second, right_second, runs.devices)
    exact = "exact" if first.same else f"{percent(first.distance)} off"
    cause = Cause(
        "approximation, as asked for",
        (),
        'gradients="moments" keeps the old moments in half their bits while a window is open: in '
        f"update {_BEFORE + 1} of this batch the second moment is {percent(second)} off, the first "
        f"moment is {exact}, and the update is {percent(update.distance)} off",
        'For the update of the undivided batch use gradients="device", "host", "swap" or "release"',
    )
    return AdamAccumulationError(first, update, (whole.loss, ours.loss), cause)


@contextmanager
def _after_some_updates(runs: ModelRuns, batch: DividedBatch) -> Iterator[None]:
    """Let every run within it begin a few updates of the undivided batch later."""
    start = runs.start
    try:
        for _ in range(_BEFORE):
            runs.whole(batch.whole)
            runs.start = StartingState(runs.model, runs.optimizer)
            runs.start.random = start.random
        yield
    finally:
        runs.start = start


def _moments(runs: ModelRuns, name: str) -> list[Tensor]:
    return [
        runs.optimizer.state[p][name].detach().cpu().clone()
        if name in runs.optimizer.state.get(p, {})
        else torch.zeros(p.shape, dtype=p.dtype)
        for p in runs.parameters
    ]


def _compared(what: str, runs: ModelRuns, ours: Vectors, right: Vectors) -> Comparison:
    return compare(
        what,
        runs.names,
        ours,
        right,
        also_right=(),
        # A moment or an update is a sum of many roundings.
        resolution=[8 * runs.unit * norm_of(one) for one in right],
        unit=runs.unit,
        devices=runs.devices,
        judged_by_line=False,
    )
