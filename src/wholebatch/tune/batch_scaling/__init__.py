"""Batch arithmetic, learning-rate and warm-up rules, and batch-size schedules."""

from wholebatch.tune.batch_scaling.auto_batch import AutoBatch, parse_auto
from wholebatch.tune.batch_scaling.batch_arithmetic import Arithmetic, share_of, solve
from wholebatch.tune.batch_scaling.batch_schedule import Amount, BatchSchedule, parse_amount
from wholebatch.tune.batch_scaling.scaling_rules import (
    Follow,
    adam_betas,
    epochs_in_updates,
    half_life,
    lr_factor,
    scale_warmup,
    scale_weight_decay,
)

__all__ = [
    "Amount",
    "Arithmetic",
    "AutoBatch",
    "BatchSchedule",
    "Follow",
    "adam_betas",
    "epochs_in_updates",
    "half_life",
    "lr_factor",
    "parse_amount",
    "parse_auto",
    "scale_warmup",
    "scale_weight_decay",
    "share_of",
    "solve",
]
