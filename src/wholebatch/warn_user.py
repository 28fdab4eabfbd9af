"""Warn the user at the line of their own code."""

from __future__ import annotations

import inspect
import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the last line outside of this package and of torch."""
    # Keras on another backend has no need of torch: it is not imported here.
    torch = sys.modules.get("torch")
    not_the_users = (_PACKAGE, *(() if torch is None else torch.__path__))
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(not_the_users):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
