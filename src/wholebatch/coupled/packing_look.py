"""A look before the first packed window: are the sequences of a row kept apart?

A model that reads its positions attends within a sequence alone. One that does not lets sequences
of a row see each other, and trains on all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.core.forward_state import ForwardState
from wholebatch.core.loss import Loss, Terms, terms_of
from wholebatch.core.splitting import Tokens
from wholebatch.core.splitting.micro_batches import lengths_of
from wholebatch.core.splitting.packing import alone
from wholebatch.core.splitting.samples import Layout
from wholebatch.coupled.local_collectives import local_collectives
from wholebatch.coupled.sample_runs import CalledModules
from wholebatch.errors import UnsupportedError

_SEQUENCES = 4


def check_packing(
    run: Callable[[Any], Loss | Terms], layout: Layout, by: Tokens, models: Sequence[nn.Module]
) -> None:
    """Refuse if some sequences in one row have another loss than each by itself.

    `run(micro)` returns the loss of a micro-batch. It runs without dropout; `models` are left as
    they were.
    """
    ones, together = alone(layout, by, lengths_of(layout, by)[0], _SEQUENCES)
    before = ForwardState(*models)
    training = [module for model in models for module in model.modules() if module.training]
    called = CalledModules(nn.ModuleList(models))
    try:
        for module in training:
            module.training = False
        with torch.no_grad(), called, local_collectives():
            apart, packed = _sums(map(run, ones)), _sums([run(together)])
    finally:
        for module in training:
            module.training = True
        before.restore()
    rounding = 1e-3 if torch.backends.cuda.matmul.allow_tf32 else 2e-5
    allowed = 1e-2 if called.sixteen_bit else rounding
    for name, (total, units) in apart.items():
        in_row, units_in_row = packed[name]
        if units == units_in_row and abs(in_row - total) <= allowed * abs(total) + 1e-12:
            continue
        raise UnsupportedError(
            f"tokens(pack=...): {len(ones)} sequences, each by itself, have a loss of {total:g} "
            f"over {units:g} units, and in one row {in_row:g} over {units_in_row:g}: the model "
            "does not keep the sequences of a row apart. Transformers' models do so with "
            "use_cache=False in their configuration and without an attention_mask; a model of your "
            "own must attend within the sequences that position_ids tell, and give no units to "
            "labels of -100. Labels that are shifted already must be called shift_labels"
        )


def _sums(losses: Iterable[Loss | Terms]) -> dict[str, tuple[float, float]]:
    """Return each term's total and units over these losses."""
    found: dict[str, tuple[float, float]] = {}
    for loss in losses:
        for name, term in terms_of(loss).items():
            total, units = found.get(name, (0.0, 0.0))
            found[name] = (total + float(term.total), units + float(term.units))
    return found
