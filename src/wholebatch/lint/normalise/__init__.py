"""Pass 1: a file in normal form. Helpers are inlined, names stand for what they were assigned."""

from __future__ import annotations

from .events import Condition, Context, Event, Loop
from .read_file import NormalFile, normalise

__all__ = ["Condition", "Context", "Event", "Loop", "NormalFile", "normalise"]
