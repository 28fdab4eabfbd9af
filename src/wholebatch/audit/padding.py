"""Refuse a loss or a model that reads the padding that `wb.tokens` trims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.audit.samples_run import Rounding
from wholebatch.batch import Tokens
from wholebatch.batch.samples import Layout
from wholebatch.batch.tokens import without_padding
from wholebatch.coupled.normalisation_layers import evaluation_mode
from wholebatch.errors import UnsupportedError
from wholebatch.losses.loss import Loss, Terms, terms_of
from wholebatch.window.forward_state import ForwardState

_SEQUENCES = 4
_TRIMMED = (
    "without it: the loss or the model uses the trimmed padding. Mark targets that do not count "
    "with -100, sum the loss over the others and pass their number as units; the model must "
    "ignore what the mask hides. A micro_batch= in samples trims nothing"
)


def check_padding(
    run: Callable[[Any], Loss | Terms], layout: Layout, by: Tokens, models: Sequence[nn.Module]
) -> bool:
    """Refuse if sequences have another loss without their padding; True if it was tried.

    Padding must not be trimmed if the loss is a mean over the width of the batch, if the model
    pools over it, or if targets lie beyond the mask.

    `run(micro)` returns the loss of a micro-batch. It runs without dropout; `models` are left as
    they were.
    """
    pair = without_padding(layout, by, _SEQUENCES)
    if pair is None:
        return False
    with ForwardState(*models), evaluation_mode(*models):
        with torch.no_grad():
            padded = terms_of(run(pair[0]))
        trimmed = terms_of(run(pair[1]))  # its graph tells the precision
    dtypes = [parameter.dtype for model in models for parameter in model.parameters()]
    rounding = Rounding.of(dtypes, [term.total for term in trimmed.values()])
    allowed = max(2e-5, rounding.relative / (5 if rounding.gradient == math.inf else 50))
    for name in padded:
        total, units = float(padded[name].total), float(padded[name].units)
        trimmed_total = float(trimmed[name].total.detach())
        trimmed_units = float(trimmed[name].units)
        # Units may be sums of weights, and a total near 0 may be one of large losses.
        same_units = math.isclose(units, trimmed_units, rel_tol=1e-5)
        if same_units and abs(trimmed_total - total) <= allowed * (abs(total) + units):
            continue
        if not math.isfinite(total):
            return False
        raise UnsupportedError(
            f"tokens(...): sequences with their padding have a loss of {total:g} over {units:g} "
            f"units, and {trimmed_total:g} over {trimmed_units:g} {_TRIMMED}"
        )
    return True
