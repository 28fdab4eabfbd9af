"""The model of training loops that the rules query: built once per file, without running it."""

from __future__ import annotations

from .events import Event, Guard, Loop
from .loop_windows import File, LoopWindow, read

__all__ = ["Event", "File", "Guard", "Loop", "LoopWindow", "read"]
