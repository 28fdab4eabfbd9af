"""Split any nested batch into micro-batches, by samples or by tokens."""

from wholebatch.batch.micro_batches import Batches, joined, split, split_numbered
from wholebatch.batch.roles import Roles
from wholebatch.batch.samples import batch_size_of, to_device
from wholebatch.batch.tokens import Tokens, tokens

__all__ = [
    "Batches",
    "Roles",
    "Tokens",
    "batch_size_of",
    "joined",
    "split",
    "split_numbered",
    "to_device",
    "tokens",
]
