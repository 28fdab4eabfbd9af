"""Batch arithmetic, learning-rate and warm-up rules, and batch-size schedules."""

from wholebatch.scaling.arithmetic import Arithmetic, over_ranks, share_of, solve
from wholebatch.scaling.follow import Follow
from wholebatch.scaling.rules import (
    adam_betas,
    epochs_in_updates,
    half_life,
    lr_factor,
    scale_lr,
    scale_warmup,
)
from wholebatch.scaling.schedule import Amount, BatchSchedule, parse_amount

__all__ = [
    "Amount",
    "Arithmetic",
    "BatchSchedule",
    "Follow",
    "adam_betas",
    "epochs_in_updates",
    "half_life",
    "lr_factor",
    "over_ranks",
    "parse_amount",
    "scale_lr",
    "scale_warmup",
    "share_of",
    "solve",
]
