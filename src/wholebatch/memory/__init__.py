"""Memory: measure it, predict it, choose what fits, and recover when it runs out."""

from wholebatch.memory.batches import resize_batch
from wholebatch.memory.budget import Memory, parse_memory
from wholebatch.memory.calibrate import Correction, calibrate, choose_on_device
from wholebatch.memory.checkpointing import (
    repeated_blocks,
    with_checkpoints,
    without_checkpoints,
)
from wholebatch.memory.choose import Choice, choose_micro_batch, choose_tokens
from wholebatch.memory.fit import Fit, Rung, fit, ladder
from wholebatch.memory.meter import CudaPeak, MemoryMeter, cuda_peak, reset_cuda_peak
from wholebatch.memory.plan import Plan, make_plan
from wholebatch.memory.predict import Prediction, predict_peak
from wholebatch.memory.recover import Recovered, Recovery, within
from wholebatch.memory.sizing import Sizing
from wholebatch.memory.trial import held_bytes, try_out

__all__ = [
    "Choice",
    "Correction",
    "CudaPeak",
    "Fit",
    "Memory",
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
    "cuda_peak",
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
