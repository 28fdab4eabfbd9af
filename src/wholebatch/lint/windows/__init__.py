"""The windows of a file in normal form: which loops accumulate, and how their windows end."""

from __future__ import annotations

from .find_windows import File, read
from .window import Window

__all__ = ["File", "Window", "read"]
