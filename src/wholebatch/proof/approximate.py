"""Adam accumulation beside the undivided batch: what is exact, and how far the rest is off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholebatch.proof.bench import Bench
from wholebatch.proof.compare import Comparison, Vectors, compare, distance, norm_of
from wholebatch.proof.observe import Run
from wholebatch.proof.reading import Reading
from wholebatch.proof.verdict import Cause, said

__all__ = ["Approximation", "approximated"]


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
        "gradients=\"moments\" gives Adam's second moment the sum of the micro-batches' squared "
        f"gradients: after this update it is {said(second)} off, the first moment is {exact}, and "
        f"the update is {said(update.distance)} off",
        'For the update of the undivided batch use gradients="device", "host" or "release"',
    )
    return Approximation(first, update, second, (whole.loss, ours.loss), cause)


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
