"""Warn the user at the line of their own code."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import torch

_NOT_THE_USERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the last line outside of this package and of torch."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
