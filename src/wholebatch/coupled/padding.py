"""Refuse a model that does not keep packed sequences apart, or that reads padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.batch import Tokens
from wholebatch.batch.micro_batches import lengths_of, without_padding
from wholebatch.batch.packing import alone
from wholebatch.batch.samples import Layout
from wholebatch.coupled.normalisation_layers import evaluation_mode
from wholebatch.coupled.sample_runs import CalledModules
from wholebatch.errors import UnsupportedError
from wholebatch.losses.loss import Loss, Terms, terms_of
from wholebatch.window.forward_state import ForwardState

_SEQUENCES = 4
_PACKED = (
    "in one row (pack=): the model does not keep the sequences of a row apart. Models of "
    "Transformers do so with use_cache=False in their configuration and without an "
    "attention_mask. Your own model must attend only within the sequences that position_ids mark, "
    "and count no units for labels of -100. Name labels that are shifted already shift_labels"
)
_TRIMMED = (
    "without it: the loss or the model uses the trimmed padding. Mark targets that do not count "
    "with -100, sum the loss over the others and pass their number as units; the model must "
    "ignore what the mask hides. A micro_batch= in samples trims nothing"
)


@torch.no_grad()
def check_padding(
    run: Callable[[Any], Loss | Terms], layout: Layout, by: Tokens, models: Sequence[nn.Module]
) -> bool:
    """Refuse if sequences have another loss in one row, or without their padding; True if tried.

    A model that reads `position_ids` attends only within a sequence. In another model, the
    sequences of a row see each other without any error. Padding must not be trimmed if the loss is
    a mean over the width of the batch, if the model pools over it, or if targets lie beyond the
    mask.

    `run(micro)` returns the loss of a micro-batch. It runs without dropout; `models` are left as
    they were.
    """
    if by.pack:
        ones, together = alone(layout, lengths_of(layout, by)[0], _SEQUENCES)
        given, why = "each by itself", _PACKED
    else:
        pair = without_padding(layout, by, _SEQUENCES)
        if pair is None:
            return False
        ones, together = [pair[0]], pair[1]
        given, why = "with their padding", _TRIMMED
    called = CalledModules(nn.ModuleList(models))
    with ForwardState(*models), evaluation_mode(*models), called:
        apart, packed = _sums(map(run, ones)), _sums([run(together)])
    rounding = 1e-3 if torch.backends.cuda.matmul.allow_tf32 else 2e-5
    allowed = 1e-2 if called.sixteen_bit else rounding
    for name, (total, units) in apart.items():
        in_row, units_in_row = packed[name]
        if units == units_in_row and abs(in_row - total) <= allowed * abs(total) + 1e-12:
            continue
        if not math.isfinite(total):
            return False
        raise UnsupportedError(
            f"tokens(...): sequences {given} have a loss of {total:g} over {units:g} units, and "
            f"{in_row:g} over {units_in_row:g} {why}"
        )
    return True


def _sums(losses: Iterable[Loss | Terms]) -> dict[str, tuple[float, float]]:
    """Return each term's total and units over these losses."""
    found: dict[str, tuple[float, float]] = {}
    for loss in losses:
        for name, term in terms_of(loss).items():
            total, units = found.get(name, (0.0, 0.0))
            found[name] = (total + float(term.total), units + float(term.units))
    return found
