"""How far a rank is: since when it stands still in a window, for how long it may, and where.

A rank counts while it is inside a window or waits in a collective. Between windows it may do what
it likes (evaluate, save) for as long as it likes: there it stands still only for those who wait.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from wholebatch.distributed.deadline import DEADLINE, parse_deadline

__all__ = ["Progress", "place_of", "said_of"]

_TIMES_SLOWEST = 10.0
_SETTLED = 2  # windows after which the slowest says something


class Progress:
    """The marks that a rank makes on its way, and the deadline for the next one."""

    def __init__(self, *, patience: float) -> None:
        self.fixed = parse_deadline(os.environ.get(DEADLINE) or "auto")
        self.least = patience  # of an automatic deadline
        self.patience = patience  # before there are windows to go by
        self.always = False  # True: between windows too
        self.count = 0
        self.windows = 0
        self.slowest = 0.0
        self.waits = 0  # in a collective of ours
        self.error: str | None = None  # what the last window was left by
        self.is_open = False
        self._handled: BaseException | None = None  # when the window was opened
        self._since: float | None = None

    def mark(self) -> None:
        """Note a step forward: from now on the next one is waited for."""
        now = time.monotonic()
        if self._since is not None:
            self.slowest = max(self.slowest, now - self._since)
        self.count += 1
        self._since = now

    def begin(self) -> None:
        """Note that a window opens."""
        self._handled = sys.exc_info()[1]
        self.is_open = True
        self.mark()

    def end(self) -> None:
        """Note that the window is over, and the error that it is being left by."""
        error = sys.exc_info()[1]
        if error is self._handled:  # the whole step is made in an except block
            error = None
        self.error = None if error is None else said_of(error)
        self.windows += self.is_open and error is None
        self.is_open = False
        self._handled = None
        self.mark()
        self.pause()

    def pause(self) -> None:
        """Stop counting, unless a window is open."""
        if self.is_open or self.always:
            self.mark()
        else:
            self._since = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a collective: a mark before and after; outside a window it leaves none open."""
        inside = self._since is not None
        self.mark()
        self.waits += 1
        try:
            yield
        finally:
            self.waits -= 1
            self.mark()
            if not inside and not self.always:
                self._since = None

    def begin_again(self) -> None:
        """Count from now: this process itself was stopped, and is not to blame the others."""
        if self._since is not None:
            self._since = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since the last mark of an open window; 0 between windows."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    @property
    def deadline(self) -> float:
        """Seconds that may pass between two marks."""
        if self.fixed is not None:
            return self.fixed
        if self.windows < _SETTLED:
            return max(self.patience, self.least)
        return max(self.least, _TIMES_SLOWEST * self.slowest)

    def stand(self) -> dict[str, Any]:
        """Return how far this rank is, as others are told."""
        place, in_collective = place_of(threading.main_thread())
        return {
            "count": self.count,
            "waits": bool(self.waits) or in_collective,
            "place": place,
            "error": self.error,
        }


def said_of(error: BaseException) -> str:
    """Return an error as Python prints it last: its class and message."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def place_of(thread: threading.Thread) -> tuple[str, bool]:
    """Return the line at which a thread stands, and True if that is in torch's collectives.

    The innermost line of the user's own code, where there is one.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "nowhere: its main thread has ended", False
    stack = traceback.extract_stack(frame)
    own = [one for one in stack if not _is_library(one.filename)]
    line = own[-1] if own else stack[-1]
    inner = stack[-1]
    place = f"{line.filename}:{line.lineno}, in {line.name}"
    if inner is not line:
        place += f" (inside {Path(inner.filename).name}:{inner.lineno}, in {inner.name})"
    return place, Path(torch.distributed.__file__).parent in Path(inner.filename).parents


def _is_library(filename: str) -> bool:
    return filename.startswith("<") or any(
        home in Path(filename).parents
        for home in (
            Path(torch.__file__).parent,
            Path(__file__).parents[1],
            Path(sysconfig.get_path("stdlib")),
            Path(sysconfig.get_path("purelib")),
        )
    )
