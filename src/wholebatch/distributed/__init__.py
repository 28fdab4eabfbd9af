"""Gradients and counts between ranks: one small class for each engine."""

from wholebatch.distributed.choose_engine import choose
from wholebatch.distributed.sync_strategy import Single, Sync

__all__ = ["Single", "Sync", "choose"]
