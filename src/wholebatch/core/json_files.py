"""Values as JSON can hold them, and files of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholebatch.core.plain_files import open_file, reason
from wholebatch.errors import OptionError

__all__ = ["finite", "read_json", "write_json"]


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
    """Return what a JSON file holds: an OSError where it cannot be read, a ValueError where it
    holds no JSON. Either says why in one line."""
    with open_file(path) as file:
        content = file.read()
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write what a command found where the user wants it, or say why that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {reason(error)}") from error
