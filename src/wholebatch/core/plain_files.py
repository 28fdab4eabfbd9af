"""Files that somebody else may have made: only plain files are opened, and none is waited for."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_file", "reason"]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; an OSError says what else the path is.

    Opening a FIFO would wait for a writer that may never come, and reading a device may never end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except ValueError as error:  # a NUL in the path
        raise OSError(f"the path {str(path)!r} is not possible: {error}") from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(f"it is {_KINDS.get(kind, 'no regular file')}, not a file")
    return os.fdopen(descriptor, "rb")


def reason(error: OSError) -> str:
    """Return what the system says of an OSError, without number and path.

    >>> reason(FileNotFoundError(2, "No such file or directory", "x"))
    'No such file or directory'
    """
    return error.strerror or str(error)
