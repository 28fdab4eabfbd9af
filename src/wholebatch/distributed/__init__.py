"""Gradients and counts between ranks: one small class for each engine."""

from wholebatch.distributed.choose_engine import choose
from wholebatch.distributed.sync_strategy import Local, Sync

__all__ = ["Local", "Sync", "choose"]
