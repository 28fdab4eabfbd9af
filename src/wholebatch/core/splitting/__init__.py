"""Splitting of any nested batch into micro-batches, by samples or by tokens."""

from wholebatch.core.splitting.division import drop_samples, split, split_numbered
from wholebatch.core.splitting.layout import batch_size_of
from wholebatch.core.splitting.to_device import to_device
from wholebatch.core.splitting.token_budget import Tokens, tokens
from wholebatch.core.splitting.unpadded_loader import Unpadded, unpadded

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
