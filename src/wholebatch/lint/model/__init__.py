"""The model of training loops that the rules query: built once per file, without running it."""

from __future__ import annotations

from .build import File, read
from .parts import Event, Guard, Loop
from .window import Window

__all__ = ["Event", "File", "Guard", "Loop", "Window", "read"]
