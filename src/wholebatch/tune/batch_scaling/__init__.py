"""Batch arithmetic, and rules for the learning rate, warm-up, betas and weight decay."""

from wholebatch.tune.batch_scaling.batch_arithmetic import Arithmetic, share_of, solve
from wholebatch.tune.batch_scaling.scaling_rules import (
    Amount,
    adam_betas,
    epochs_in_updates,
    half_life,
    lr_factor,
    parse_amount,
    scale_warmup,
    scale_weight_decay,
)

__all__ = [
    "Amount",
    "Arithmetic",
    "adam_betas",
    "epochs_in_updates",
    "half_life",
    "lr_factor",
    "parse_amount",
    "scale_warmup",
    "scale_weight_decay",
    "share_of",
    "solve",
]
