"""Memory: measure it, predict it, choose what fits, and recover when it runs out."""

from wholebatch.memory.activation_checkpointing import (
    repeated_blocks,
    with_checkpoints,
    without_checkpoints,
)
from wholebatch.memory.budget import Budget, parse_memory
from wholebatch.memory.choose_micro_batch import (
    Choice,
    choose_micro_batch,
    choose_tokens,
    resize_batch,
)
from wholebatch.memory.make_it_fit import Fit, Rung, fit, ladder
from wholebatch.memory.meter import MemoryMeter, reset_cuda_peak
from wholebatch.memory.micro_batch_fitting import Sizing
from wholebatch.memory.out_of_memory import Recovered, Recovery, within
from wholebatch.memory.plan import Plan, make_plan
from wholebatch.memory.predict import Prediction, predict_peak
from wholebatch.memory.trial_step import (
    Correction,
    calibrate,
    choose_on_device,
    held_bytes,
    try_out,
)

__all__ = [
    "Budget",
    "Choice",
    "Correction",
    "Fit",
    "MemoryMeter",
    "Plan",
    "Prediction",
    "Recovered",
    "Recovery",
    "Rung",
    "Sizing",
    "calibrate",
    "choose_micro_batch",
    "choose_on_device",
    "choose_tokens",
    "fit",
    "held_bytes",
    "ladder",
    "make_plan",
    "parse_memory",
    "predict_peak",
    "repeated_blocks",
    "reset_cuda_peak",
    "resize_batch",
    "try_out",
    "with_checkpoints",
    "within",
    "without_checkpoints",
]
