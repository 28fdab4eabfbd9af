"""Values as JSON can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["finite"]


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
