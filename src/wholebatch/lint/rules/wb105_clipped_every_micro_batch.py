"""Gradients are clipped for every micro-batch instead of once per update."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Context
from ..model.expressions import text
from .rule_base import Edit, Report, is_right_but_for, moved, rule, stepped


@rule("clipped every micro-batch", fixable=True)
def check(file: File) -> Iterator[Report]:
    """Yield every clipping call that is not at the boundary."""
    for window in file.accumulating:
        clips = window.of("clip")
        for clip in clips:
            # Clipped on both sides of a condition, it is clipped on every micro-batch.
            either = [c for c in clips if window.when(c) == "sometimes" and c.excludes(clip)]
            if window.when(clip) != "always" and not (window.when(clip) == "sometimes" and either):
                continue
            contexts = [text(c.expr) for c in clip.path if isinstance(c, Context)]
            if window.shape == "accelerate" and not any(".accumulate(" in c for c in contexts):
                continue
            yield Report(
                clip.node,
                "gradients are clipped on every micro-batch: clip once, at the end of the window, "
                "before the optimizer steps",
                _fix(window, clips),
                unsafe=not is_right_but_for(window, *clips),
            )


def _fix(window: LoopWindow, clips: list[Event]) -> tuple[Edit, ...]:
    steps = stepped(window)
    if window.of("unscale") or not steps or len(clips) > 2:
        return ()
    if steps[0].detail == "scaler" or any(clip.order > steps[0].order for clip in clips):
        return ()
    if len(clips) == 1:
        return moved(clips[0], window, "before")
    # One clip on each side of a setting: both move, and so does the question.
    first, second = clips
    guards = [clip.guards(window.loop) for clip in clips]
    alone = all(
        isinstance(clip.stmt, ast.Expr) and clip.path == (*window.loop.parents, window.loop, *of)
        for clip, of in zip(clips, guards, strict=True)
    )
    if not alone or [len(of) for of in guards] != [1, 1] or len(steps) != 1:
        return ()
    asked, other = guards[0][0], guards[1][0]
    if asked.expr is not other.expr or not asked.positive or window.varies(asked):
        return ()
    both = f"if {text(asked.expr)}:\n    {text(first.stmt)}\nelse:\n    {text(second.stmt)}\n"
    removed = [Edit.at("delete", clip.stmt) for clip in clips]
    return (*removed, Edit.at("before", steps[0].stmt, both))
