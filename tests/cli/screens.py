"""A terminal of a given width: what a command leaves on it, line by line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PARTS = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


def screen_of(written: str) -> list[str]:
    """The lines that a terminal shows, once bars and spinners have been wiped away."""
    lines, row = [""], 0
    fresh = True  # a carriage return: the next text replaces the line
    for count, code, back, down, text in _PARTS.findall(written):
        if down:
            row += 1
            lines += [""] * (row + 1 - len(lines))
            fresh = True
        elif back:
            fresh = True
        elif code == "A":
            row = max(0, row - int(count or 1))
        elif code == "K":
            lines[row] = ""
        elif text:
            lines[row] = text if fresh else lines[row] + text
            fresh = False
    return [line.rstrip() for line in lines]


@contextmanager
def terminal(width: int) -> Iterator[list[str]]:
    """Make standard output and error a terminal; yield a list that receives what was written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other side is closed
                return
            if not part:
                return
            written.append(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    result: list[str] = []
    before = sys.stdout, sys.stderr
    with os.fdopen(theirs, "w", encoding="utf-8", buffering=1) as stream:
        sys.stdout = sys.stderr = stream
        try:
            yield result
        finally:
            sys.stdout, sys.stderr = before
    reader.join(10)
    os.close(ours)
    result += screen_of(b"".join(written).decode("utf-8"))
