"""Read and write plain files safely, and convert values to JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from wholebatch.errors import StateError, WholebatchError


def reason(error: BaseException) -> str:
    """Return one line on what went wrong; of the system's errors without number and path.

    >>> reason(FileNotFoundError(2, "No such file or directory", "x"))
    'No such file or directory'
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


def finite(value: Any) -> Any:
    """Return the value with None for every number that is not finite: JSON has no inf.

    >>> finite({"loss": float("nan"), "norms": (1.5, float("inf"))})
    {'loss': None, 'norms': [1.5, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; an OSError or a ValueError says why it cannot."""
    return json.loads(path.read_text(encoding="utf-8"))


def load_json(path: Path, error: type[WholebatchError], label: str | Path) -> Any:
    """Return what a JSON file holds, or raise `error` with the label and the reason."""
    try:
        return read_json(path)
    except OSError as problem:
        raise error(f"{label}: cannot be read: {reason(problem)}") from problem
    except (ValueError, RecursionError) as problem:
        raise error(f"{label}: is not JSON: {problem}") from None


def write_atomically(path: Path, text: str, error: type[WholebatchError] = StateError) -> None:
    """Replace a file atomically: it holds the old text or the new, never a part.

    Missing folders are made. `error` says why it cannot be.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    temporary = target.with_name(f"{target.name}.writing-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            to_disk(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode)
        temporary.replace(target)
        folder_to_disk(target.parent)
    except (OSError, ValueError) as problem:  # a NUL in the path
        with suppress(OSError, ValueError):
            temporary.unlink()
        raise error(f"{path}: cannot be written: {reason(problem)}") from problem


def to_disk(descriptor: int) -> None:
    """Wait until a file is on the disk."""
    os.fsync(descriptor)


def folder_to_disk(folder: Path) -> None:
    """Make a rename in it last through a power cut (not every system can)."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            to_disk(descriptor)
        finally:
            os.close(descriptor)
