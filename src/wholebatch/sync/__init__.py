"""How gradients and counts travel between ranks: one small class for each engine."""

from wholebatch.sync.choose import choose
from wholebatch.sync.single import Single
from wholebatch.sync.strategy import Sync

__all__ = ["Single", "Sync", "choose"]
