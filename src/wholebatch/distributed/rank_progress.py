"""The progress of a rank: its last step forward, the deadline for the next one, and its position.

The deadline runs while a rank is inside a window or waits in a collective. Between windows a rank
may evaluate or save for as long as it likes; only the ranks that wait for it count the time.
"""

from __future__ import annotations

import math
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

from wholebatch.errors import OptionError

DEADLINE = "WHOLEBATCH_DEADLINE"
"""The environment variable of the deadline: seconds, "off", or "auto"."""
_TIMES_SLOWEST = 10.0
_SETTLED = 2  # windows after which the slowest says something


def parse_deadline(text: str, label: str = DEADLINE) -> float | None:
    """Return the seconds that a user wrote: None for "auto", infinity for "off".

    >>> parse_deadline("90"), parse_deadline("auto"), parse_deadline("off")
    (90.0, None, inf)
    """
    if text in ("auto", "off"):
        return None if text == "auto" else math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise OptionError(f'{label} {text}: must be seconds above 0, "auto" or "off"')
    return seconds


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
        self.error: str | None = None  # that the last window ended with
        self.is_open = False
        self._handled: BaseException | None = None  # when the window was opened
        self._since: float | None = None

    def mark(self) -> None:
        """Note a step forward; the deadline for the next one begins."""
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
        self.error = None if error is None else error_line(error)
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
        """Mark the begin and end of a collective; outside a window, stop counting afterwards."""
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
        """Count from now: this process itself was stopped, so the others are not to blame."""
        if self._since is not None:
            self._since = time.monotonic()

    @property
    def idle(self) -> float:
        """The seconds since the last mark of an open window; 0 between windows."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    @property
    def deadline(self) -> float:
        """The seconds that may pass between two marks."""
        if self.fixed is not None:
            return self.fixed
        if self.windows < _SETTLED:
            return max(self.patience, self.least)
        return max(self.least, _TIMES_SLOWEST * self.slowest)

    def position(self) -> dict[str, Any]:
        """Return how far this rank is and where, for the other ranks."""
        place, in_collective = place_of(threading.main_thread())
        return {
            "count": self.count,
            "waits": bool(self.waits) or in_collective,
            "place": place,
            "error": self.error,
        }


def error_line(error: BaseException) -> str:
    """Return an error as Python prints it last: its class and message."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def place_of(thread: threading.Thread) -> tuple[str, bool]:
    """Return the line at which a thread stands, and True if that is in torch's collectives.

    It is the innermost line of the user's own code, if there is one.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "nowhere: its main thread has ended", False
    stack = traceback.extract_stack(frame)
    homes = {
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
        Path(sysconfig.get_path("stdlib")),
        Path(sysconfig.get_path("purelib")),
    }
    own = [
        one
        for one in stack
        if not one.filename.startswith("<") and homes.isdisjoint(Path(one.filename).parents)
    ]
    line, inner = own[-1] if own else stack[-1], stack[-1]
    place = f"{line.filename}:{line.lineno}, in {line.name}"
    if inner is not line:
        place += f" (inside {Path(inner.filename).name}:{inner.lineno}, in {inner.name})"
    return place, Path(torch.distributed.__file__).parent in Path(inner.filename).parents
