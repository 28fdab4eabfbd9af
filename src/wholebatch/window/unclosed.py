"""Warn of a window that nobody closed, when its accumulator or the program ends."""

from __future__ import annotations

import atexit
import logging
import sys
from weakref import WeakSet

from wholebatch.window.ledger import Ledger, Turn

_log = logging.getLogger("wholebatch")


class UnclosedWarning:
    """Warns of an open window at the end of its owner: its micro-batches made no update."""

    def __init__(self, ledger: Ledger, turn: Turn, *, owner: str, closes: str) -> None:
        self._ledger, self._turn = ledger, turn
        self._owner, self._closes = owner, closes
        _all.add(self)

    def warn(self) -> None:
        """Warn if a window is open. After an error, which says enough, none must be closed."""
        micro_batches = self._ledger.held
        if micro_batches and not self._turn.failed and not hasattr(sys, "last_type"):
            _log.warning(
                "%s was deleted with an open window (micro-batches in it: %d), which made no "
                "update. Close a short last window with flush(), or %s, which closes it",
                self._owner,
                micro_batches,
                self._closes,
            )
        self._turn.failed = True  # it is said once


_all: WeakSet[UnclosedWarning] = WeakSet()


@atexit.register
def _warn_at_exit() -> None:
    """Warn at the end of a script: later, the names of this module may be gone."""
    for warning in list(_all):
        warning.warn()
