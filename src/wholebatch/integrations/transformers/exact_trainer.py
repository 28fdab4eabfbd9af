"""`exact`: a trainer's class with the mixin before it."""

from __future__ import annotations

from typing import Any

from wholebatch.core.close import Policy
from wholebatch.errors import OptionError
from wholebatch.integrations.transformers.trainer_facts import refuse_own_batches
from wholebatch.integrations.transformers.trainer_mixin import (
    ExactWindows,
    MicroBatch,
    UnitsFunction,
)
from wholebatch.memory.budget import Budget

__all__ = ["exact"]


def exact(
    trainer: type[Any],
    *,
    units: UnitsFunction | None = None,
    micro_batch: MicroBatch = None,
    memory: Budget | None = None,
    batchnorm: str = "refuse",
    nonfinite: Policy = "raise",
    audit: bool = True,
) -> type[Any]:
    """Return the class of trainer whose every update is that of the undivided global batch.

    The trainer's loss stays a mean, which is what Transformers calls the loss. `units(inputs)`
    counts what it is a mean over, on the inputs that the loss is given; the default counts the
    labels that are not -100 (from the second one on, where the model's loss shifts them).
    `micro_batch` cuts every
    batch of the loader further, into that many samples, or by "auto" into the most that are
    predicted to fit into `memory` ("20GiB", a fraction, or what is free); the update stays the
    same. A loss or gradient that is not finite raises `NonFiniteError` before the step; with
    `nonfinite="skip"` such a window makes no update (the scheduler is stepped all the same).
    """
    if not isinstance(trainer, type) or not hasattr(trainer, "training_step"):
        raise OptionError(
            f"exact({trainer!r}): must be transformers.Trainer, or a class that descends from it"
        )
    refuse_own_batches(trainer)
    if units is not None and not callable(units):
        raise OptionError(f"units={units!r}: must be a function of a batch's inputs")
    if micro_batch not in (None, "auto") and (
        isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1
    ):
        raise OptionError(
            f'micro_batch={micro_batch!r}: must be a positive number of samples, "auto" or None'
        )
    if memory is not None and micro_batch != "auto":
        raise OptionError(f'memory={memory!r} without micro_batch="auto": it would not be used')
    options = {
        "units_of": None if units is None else staticmethod(units),
        "micro_batch": micro_batch,
        "memory": memory,
        "batchnorm": batchnorm,
        "nonfinite": nonfinite,
        "audit": audit,
    }
    return type(f"Exact{trainer.__name__}", (ExactWindows, trainer), options)
