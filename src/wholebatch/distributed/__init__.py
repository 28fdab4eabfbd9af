"""How gradients and counts travel between ranks: one small class for each engine."""

from wholebatch.distributed.choose_engine import choose
from wholebatch.distributed.single_process import Single
from wholebatch.distributed.sync_strategy import Sync

__all__ = ["Single", "Sync", "choose"]
