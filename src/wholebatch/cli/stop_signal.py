"""Ctrl-C and SIGTERM: the first finishes the window, the second ends the process."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

STOPPED = 130
"""The exit status of a run that was asked to stop (the shell's own for Ctrl-C)."""


class StopRequest:
    """While entered, a signal only sets `requested`; a second one ends the process at once.

    Ending at once loses nothing: checkpoints are whole or not there.
    """

    def __init__(self, *, told: bool = True) -> None:
        self.requested = False
        self._told = told
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # not in the main thread: signals are not ours to take
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_worker = os.getpid() != self._process  # forked to read the data
        if self.requested and is_worker:
            os._exit(STOPPED)
        if self.requested:
            # The terminal's cursor is hidden behind a bar; no other clean-up may be waited for.
            if sys.stdout.isatty():
                os.write(1, b"\x1b[?25h\n")
            os.write(2, b"aborted\n")
            os._exit(STOPPED)
        self.requested = True
        if self._told and not is_worker:
            newline = b"\n" if sys.stderr.isatty() else b""  # after the terminal's own ^C
            os.write(2, newline + b"stopping after this window (again: at once)\n")
