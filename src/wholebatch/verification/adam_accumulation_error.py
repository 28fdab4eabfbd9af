"""Adam accumulation beside the undivided batch: what is exact, and how far the rest is off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholebatch.verification.batch_reading import Reading
from wholebatch.verification.model_runs import Bench
from wholebatch.verification.observed_window import Run, Start
from wholebatch.verification.run_comparison import (
    Comparison,
    Vectors,
    compare,
    distance,
    norm_of,
    said,
)
from wholebatch.verification.verdicts import Cause

__all__ = ["Approximation", "approximated"]

_BEFORE = 3
"""Updates of the undivided batch before the one that is compared: the first of all, from moments
that are zero, has nothing to round."""


@dataclass(frozen=True)
class Approximation:
    """One update of both; `cause` says in a sentence what was measured."""

    first: Comparison
    update: Comparison
    second: float
    losses: tuple[float | None, float | None]
    cause: Cause


def approximated(bench: Bench, batch: Any, micro_batch: Any, reading: Reading) -> Approximation:
    """The undivided batch and its Adam accumulation, compared in moments and update."""
    with _under_way(bench, batch):
        whole, right = _with_moments(bench, lambda: bench.whole(batch))
        ours, found = _with_moments(bench, lambda: bench.accumulated(batch, micro_batch, reading))
    unit = bench.numbers.unit(bench.model)
    first = _compared("first moment", bench, found["exp_avg"], right["exp_avg"], unit)
    update = _compared("update", bench, ours.update, whole.update, unit)
    second = distance(found["exp_avg_sq"], right["exp_avg_sq"], bench.devices)
    exact = "exact" if first.same else f"{said(first.distance)} off"
    cause = Cause(
        "approximation, as asked for",
        (),
        'gradients="moments" keeps the old moments in half their bits while a window is open: in '
        f"update {_BEFORE + 1} of this batch the second moment is {said(second)} off, the first "
        f"moment is {exact}, and the update is {said(update.distance)} off",
        'For the update of the undivided batch use gradients="device", "host", "swap" or "release"',
    )
    return Approximation(first, update, second, (whole.loss, ours.loss), cause)


@contextmanager
def _under_way(bench: Bench, batch: Any) -> Iterator[None]:
    """Within it every run begins a few updates of the undivided batch later."""
    start = bench.start
    try:
        for _ in range(_BEFORE):
            bench.whole(batch)
            bench.start = Start(bench.model, bench.optimizer)
            bench.start.random = start.random
        yield
    finally:
        bench.start = start


def _with_moments(bench: Bench, run: Callable[[], Run]) -> tuple[Run, dict[str, list[Tensor]]]:
    made = run()
    moments = {
        name: [
            bench.optimizer.state[p][name].detach().cpu().clone()
            if name in bench.optimizer.state.get(p, {})
            else torch.zeros(p.shape, dtype=p.dtype)
            for p in bench.parameters
        ]
        for name in ("exp_avg", "exp_avg_sq")
    }
    return made, moments


def _compared(what: str, bench: Bench, ours: Vectors, right: Vectors, unit: float) -> Comparison:
    return compare(
        what,
        bench.names,
        ours,
        right,
        also_right=(),
        # A moment or an update is a sum of many roundings.
        resolution=[0.0 if one is None else 8 * unit * norm_of(one) for one in right],
        unit=unit,
        devices=bench.devices,
        judged_by_line=False,
    )
