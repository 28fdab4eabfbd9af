"""Gradients and counts between ranks: one small class for each engine.

The names are imported when they are used: `rank_progress` must load without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wholebatch.distributed.choose_engine import choose
    from wholebatch.distributed.sync_strategy import Single, Sync

__all__ = ["Single", "Sync", "choose"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "choose_engine" if name == "choose" else "sync_strategy"
    return getattr(import_module(f"{__name__}.{home}"), name)
