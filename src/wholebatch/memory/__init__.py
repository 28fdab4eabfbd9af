"""Memory: measure it, predict it, choose what fits, and recover when it runs out."""

from wholebatch.memory.activation_checkpointing import repeated_blocks, with_checkpoints
from wholebatch.memory.choose_micro_batch import choose_micro_batch, resize_batch
from wholebatch.memory.meter import MemoryMeter
from wholebatch.memory.plan import make_plan
from wholebatch.memory.predict import predict_peak
from wholebatch.memory.trial_step import try_out

__all__ = [
    "MemoryMeter",
    "choose_micro_batch",
    "make_plan",
    "predict_peak",
    "repeated_blocks",
    "resize_batch",
    "try_out",
    "with_checkpoints",
]
