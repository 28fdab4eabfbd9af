"""The right answer of a window, from the loss function of a model or a recipe.

The undivided batch's gradient is the sum of `units / all units × mean` over its micro-batches, for
every term of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.verification.distances import TIMES_THE_FLOOR, apart
from wholebatch.verification.divided_batch import DividedBatch, whole_of
from wholebatch.verification.evidence import KnownTerms
from wholebatch.verification.model_runs import ModelRuns
from wholebatch.verification.parameter_rows import ParameterRows

Terms = Mapping[str, tuple[Tensor, float]]
"""By term of a loss: the gradient of its sum, as a row, and its units."""


def gradient_rows(
    runs: ModelRuns, rows: ParameterRows, indices: Sequence[int], batch: Any
) -> Terms:
    """Return the gradients of a batch's terms, as the kept numbers of these parameters."""
    return {
        name: (rows.sample_named(gradients, indices), units)
        for name, (gradients, units) in runs.gradients_of_terms(batch).items()
    }


def known_terms(
    runs: ModelRuns, rows: ParameterRows, indices: Sequence[int], micros: Sequence[Any]
) -> KnownTerms:
    """Return the gradient and the units of each micro-batch's means, and what rounding explains.

    The floor is how far the undivided batch is from itself in another order.
    """
    parts = [gradient_rows(runs, rows, indices, micro) for micro in micros]
    units = {name: tuple(part[name][1] for part in parts) for name in parts[0]}
    means = {
        name: torch.stack([part[name][0] / (part[name][1] or 1.0) for part in parts])
        for name in units
    }

    def added(*parts: Terms) -> Tensor:
        return torch.stack(
            [row / (sum(units[name]) or 1.0) for terms in parts for name, (row, _) in terms.items()]
        ).sum(0)

    unit = runs.scale.unit
    off, floor, whole = 0.0, unit, whole_of(micros)
    if whole is not None:
        reordered = DividedBatch(whole).in_other_orders()[0]
        right, again = (added(gradient_rows(runs, rows, indices, b)) for b in (whole, reordered))
        off, floor = apart(added(*parts), right), max(unit, apart(again, right))
    limit = math.sqrt(unit) / TIMES_THE_FLOOR
    is_coupled = off > limit
    floor = min(max(floor, 0.0 if is_coupled else off), limit)
    return KnownTerms(means, units, floor, is_coupled, tuple(micros))
