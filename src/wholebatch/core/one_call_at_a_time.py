"""One call at a time on an object that holds a window."""

from __future__ import annotations

import threading
from typing import NoReturn

from wholebatch.errors import UnsupportedError, WindowError

__all__ = ["Turn"]


class Turn:
    """Refuse a call while another one is running, in a second thread or inside the first.

    Both would write the same gradients at once. A lock that waits would hide the first mistake and
    never return from the second.

    >>> turn = Turn("WholeBatch.step()")
    >>> with turn:
    ...     turn.taken
    True
    >>> turn.taken
    False
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._lock = threading.Lock()

    @property
    def taken(self) -> bool:
        """True while a call is running."""
        return self._lock.locked()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise WindowError(
                f"{self._call} is running already, and was called again from another thread, or "
                "from inside (its loss function, a hook, a callback): a window is made by one call "
                "after the other; give each thread a model and a wholebatch object of its own"
            )

    def __reduce__(self) -> NoReturn:
        owner = self._call.partition(".")[0]
        raise UnsupportedError(
            f"{owner} cannot be pickled or copied: it holds hooks, buffers and locks of this "
            "process. Save its state_dict() with those of the model and the optimizer, and make a "
            f"new {owner} to load them into"
        )

    def __exit__(self, *error: object) -> None:
        self._lock.release()
