"""Gradients are clipped for every micro-batch instead of once per update.

Clipping the sum so far shrinks the early micro-batches again and again: the update has another
direction than that of the batch. Clip once per window, just before the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..model import File
from ..model.events import Context
from .rule_base import Report, rule


@rule("clipped every micro-batch")
def check(file: File) -> Iterator[Report]:
    """Yield every clipping call that is not at the boundary."""
    for window in file.accumulating:
        clips = window.of("clip")
        # Not those on a branch without a backward of this window.
        clips = [c for c in clips if not all(c.excludes(b) for b in window.backwards)]
        for clip in clips:
            # Clipped on both sides of a condition, it is clipped on every micro-batch.
            either = [c for c in clips if window.when(c) == "sometimes" and c.excludes(clip)]
            if window.when(clip) != "always" and not (window.when(clip) == "sometimes" and either):
                continue
            contexts = [c.made for c in clip.path if isinstance(c, Context)]
            if window.shape == "accelerate" and not any("accumulate(" in c for c in contexts):
                continue
            yield Report(
                clip.node,
                "gradients are clipped on every micro-batch: clip once, at the end of the window, "
                "before the optimizer steps",
            )
