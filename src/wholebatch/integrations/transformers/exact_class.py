"""`exact`: the class of a trainer with exact windows."""

from __future__ import annotations

from typing import Any

from wholebatch.compile import Execute
from wholebatch.core.close import Policy
from wholebatch.core.options import BatchNorm, Memory, Samples
from wholebatch.core.whole_batch import MicroBatch
from wholebatch.coupled.contrastive.losses import Coupled
from wholebatch.errors import OptionError
from wholebatch.integrations.transformers.exact_trainer import (
    ExactWindows,
    UnitsFunction,
    refuse_own_batches,
)
from wholebatch.integrations.transformers.trl_trainers import (
    ExactDistillation,
    ExactKTO,
    ExactPairs,
    ExactPolicy,
)
from wholebatch.memory.budget import Budget

_OF_TRL: dict[str, type[ExactWindows]] = {
    "DPOTrainer": ExactPairs,
    "RewardTrainer": ExactPairs,
    "KTOTrainer": ExactKTO,
    "GRPOTrainer": ExactPolicy,
    "RLOOTrainer": ExactPolicy,
    "GKDTrainer": ExactDistillation,
}


def exact(
    trainer: type[Any],
    *,
    units: UnitsFunction | None = None,
    loss: Coupled | None = None,
    execute: Execute = "auto",
    micro_batch: MicroBatch | Samples | None = None,
    memory: Memory | Budget | None = None,
    batchnorm: BatchNorm | str = "exact",
    nonfinite: Policy = "raise",
    audit: bool = True,
) -> type[Any]:
    """Return the class of trainer whose every update is that of the undivided global batch.

    The trainer's loss stays a mean, which is what Transformers calls the loss. `units(inputs)`
    counts what it is a mean over, on the inputs that the loss is given; the default counts the
    labels that are not -100 (from the second one on, where the model's loss shifts them). A loss
    that compares samples is `loss=wb.Coupled(encode, loss)`; it takes the place of `compute_loss`
    in training.

    The other options are those of `wb.WholeBatch`. `execute="auto"` compiles and records
    micro-steps on a GPU once that pays ("graph", with `torch_compile=True` too: at once; "eager":
    never). `micro_batch` cuts every batch of the loader further: a number of samples, "auto" (the
    most that are predicted to fit into `memory`: "20GiB", a fraction, or what is free), or
    `wb.tokens(4096)`. A batch that does not fit is cut by itself. The update stays the same. A loss
    or gradient that is not finite raises `NonFiniteError` before the step; with `nonfinite="skip"`
    such a window makes no update (the scheduler is stepped all the same).
    """
    if not isinstance(trainer, type) or not hasattr(trainer, "training_step"):
        raise OptionError(
            f"exact({trainer!r}): must be transformers.Trainer, or a class that descends from it"
        )
    windows = _windows_of(trainer)
    if windows is ExactWindows:
        refuse_own_batches(trainer)
    if units is not None and not callable(units):
        raise OptionError(f"units={units!r}: must be a function of a batch's inputs")
    if loss is not None and (units is not None or not isinstance(loss, Coupled)):
        raise OptionError(
            f"loss={loss!r}: must be wb.Coupled(encode, loss), which brings its units; another "
            "loss is the trainer's compute_loss or compute_loss_func"
        )
    if micro_batch is not None:
        Samples.of(micro_batch)
    elif memory is not None:
        raise OptionError(
            f'memory={memory!r} without micro_batch="auto" or another: it would not be used'
        )
    options = {
        **({} if units is None else {"units_of": staticmethod(units)}),
        "coupled": loss,
        "execute": execute,
        "micro_batch": micro_batch,
        "memory": memory,
        "batchnorm": batchnorm,
        "nonfinite": nonfinite,
        "audit": audit,
        # The module whose code is the user's own: what it reads is watched (compile/).
        "__module__": trainer.__module__,
    }
    return type(f"Exact{trainer.__name__}", (windows, trainer), options)


def _windows_of(trainer: type[Any]) -> type[ExactWindows]:
    """Return the windows that know the loss of the TRL class that the trainer descends from."""
    of_trl = (kind.__name__ for kind in trainer.__mro__ if kind.__module__.startswith("trl."))
    return _OF_TRL.get(next(of_trl, ""), ExactWindows)
