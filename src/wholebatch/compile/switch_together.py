"""The window at which all ranks switch to compiled code.

A rank that loads its graph makes the others wait at the end of the window. So that they wait once,
rank 0 waits until all are ready, and names a window that nobody has reached yet: while it is in
window k, no rank can be further than k, because a window ends with the sum over the ranks. Whoever
begins window k + 2 has seen the answer, in the store of the process group.
"""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import torch.distributed as dist

_PATIENCE = 120.0
"""Seconds after which a rank that is ready switches alone."""
_numbers = count()
"""Every rank makes its executors in the same order."""


class SwitchTogether:
    """Says when this rank may switch: at once, if it is alone."""

    def __init__(self) -> None:
        self._name = f"wholebatch/switch/{next(_numbers)}"
        self._said = False
        self._since = 0.0
        self._window: int | None = None

    def announce(self) -> None:
        """Say that this rank is ready, or will never switch, so that no other waits for it."""
        if not self._said and (store := _store()) is not None:
            self._said = True
            self._since = time.perf_counter()
            store.add(f"{self._name}/ready", 1)

    def may_switch(self, window: int) -> bool:
        """True if this rank, which is ready, switches in the window of this number."""
        store = _store()
        if store is None:
            return True
        self.announce()
        if self._window is None:
            self._window = self._agreed(store, window)
        if self._window is None:
            return time.perf_counter() - self._since > _PATIENCE
        return window >= self._window

    def _agreed(self, store: Any, window: int) -> int | None:
        if dist.get_rank() == 0:
            if store.add(f"{self._name}/ready", 0) < dist.get_world_size():
                return None
            store.set(f"{self._name}/window", str(window + 2))
            return window + 2
        if not store.check([f"{self._name}/window"]):
            return None
        return int(store.get(f"{self._name}/window"))


def _store() -> Any:
    """Return the store of the process group, or None if there is only one rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()
