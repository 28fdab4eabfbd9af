"""The model of training loops that the rules query: built once per file, without running it."""

from __future__ import annotations

from .events import Event, Guard, Loop
from .find_windows import File, read
from .loop_windows import LoopWindow

__all__ = ["Event", "File", "Guard", "Loop", "LoopWindow", "read"]
