"""Gradients are clipped on every micro-batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Context
from ..model.expressions import text
from .rule_base import Edit, Report, is_right_but_for, rule, stepped


@rule(
    "WB105",
    "clipped every micro-batch",
    "Gradients are clipped for every micro-batch instead of once per update.",
    fixable=True,
)
def check(file: File) -> Iterator[Report]:
    """Yield every clipping call that is not at the boundary."""
    for window in file.accumulating:
        for clip in window.of("clip"):
            if window.when(clip) != "always":
                continue
            contexts = [text(c.expr) for c in clip.path if isinstance(c, Context)]
            if window.shape == "accelerate" and not any(".accumulate(" in c for c in contexts):
                continue
            yield Report(
                clip.node,
                "gradients are clipped on every micro-batch: clip once, at the end of the window, "
                "before the optimizer steps",
                _fix(window, clip),
                unsafe=not is_right_but_for(window, clip),
            )


def _fix(window: LoopWindow, clip: Event) -> tuple[Edit, ...]:
    steps = stepped(window)
    if window.shape != "boundary" or len(steps) != 1 or not isinstance(clip.stmt, ast.Expr):
        return ()
    if clip.path != (*window.loop.parents, window.loop) or clip.stmt.value is not clip.node:
        return ()
    if window.of("unscale") or steps[0].detail == "scaler" or len(window.of("clip")) != 1:
        return ()
    if clip.order > steps[0].order:
        return ()
    return (Edit.at("delete", clip.stmt), Edit.at("before", steps[0].stmt, text(clip.stmt)))
