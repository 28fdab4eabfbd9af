"""Splitting of any nested batch into micro-batches, by samples or by tokens."""

from wholebatch.splitting.budget import Tokens, tokens
from wholebatch.splitting.device import to_device
from wholebatch.splitting.division import drop_samples, split, split_numbered
from wholebatch.splitting.layout import batch_size_of
from wholebatch.splitting.loader import Unpadded, unpadded

__all__ = [
    "Tokens",
    "Unpadded",
    "batch_size_of",
    "drop_samples",
    "split",
    "split_numbered",
    "to_device",
    "tokens",
    "unpadded",
]
