"""Memory: measure it, choose what fits, recover when it runs out, and predict it for a plan."""

from wholebatch.memory.activation_checkpointing import repeated_blocks, with_checkpoints
from wholebatch.memory.choose_micro_batch import choose_micro_batch, resize_batch
from wholebatch.memory.meter import MemoryMeter
from wholebatch.memory.plan import make_plan
from wholebatch.memory.predict import predict_peak

__all__ = [
    "MemoryMeter",
    "choose_micro_batch",
    "make_plan",
    "predict_peak",
    "repeated_blocks",
    "resize_batch",
    "with_checkpoints",
]
