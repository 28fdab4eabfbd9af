"""Values as JSON can hold them, and files of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholebatch.errors import OptionError

__all__ = ["finite", "write_json"]


def finite(value: Any) -> Any:
    """The same value, with None for every number that is not finite: JSON has no inf and nan.

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


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write what a command found where the user wants it, or say why that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror or error}") from error
