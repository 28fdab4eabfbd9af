"""Split any nested batch into micro-batches, by samples or by tokens."""

from wholebatch.batch.micro_batches import (
    Batches,
    Tokens,
    joined,
    split,
    split_numbered,
    tokens,
)
from wholebatch.batch.samples import batch_size_of, to_device

__all__ = [
    "Batches",
    "Tokens",
    "batch_size_of",
    "joined",
    "split",
    "split_numbered",
    "to_device",
    "tokens",
]
