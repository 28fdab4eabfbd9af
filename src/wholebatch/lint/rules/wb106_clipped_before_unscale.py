"""Gradients are clipped while they are still multiplied by the loss scale."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Env
from ..model.expressions import dotted, last_part, text
from .rule_base import Edit, Report, rule

_UNSCALES_ITSELF = re.compile(
    r"accelerator|fabric|scaler|amp\.|trainer|^self\.clip_grad\w* ?$", re.I
)


@rule(
    "WB106",
    "clipped before unscale",
    "Gradients are clipped while they are still multiplied by the loss scale.",
    fixable=True,
)
def check(file: File) -> Iterator[Report]:
    """Yield clipping after a scaled backward without unscaling in between."""
    for window in file.windows:
        events = [*window.events, *window.after] if window.shape == "nested" else window.events
        scaled = [e for e in events if e.kind == "backward" and _scaler(e) is not None]
        unscales = [e for e in events if e.kind == "unscale"]
        for clip in (e for e in events if e.kind == "clip"):
            source = _source(clip, scaled)
            if source is None or _UNSCALES_ITSELF.search(_clipper(clip)):
                continue
            if any(u.order < clip.order and not u.excludes(clip) for u in unscales):
                continue
            yield Report(
                clip.node,
                "gradients are clipped while still multiplied by the loss scale: call "
                f"`{_scaler(source)}.unscale_(optimizer)` first",
                _fix(window, clip, source, events, unscales),
            )


def _clipper(clip: Event) -> str:
    """Return what clips, without the norm: `amp.master_params(optimizer)` is unscaled."""
    call = clip.node
    if not isinstance(call, ast.Call):
        return ""
    return " ".join(text(part) for part in (call.func, *call.args[:1]))


def _source(clip: Event, scaled: list[Event]) -> Event | None:
    before = [e for e in scaled if e.order < clip.order and not e.excludes(clip)]
    return before[-1] if before else None


def _scaler(event: Event) -> str | None:
    """Return the scaler of `scaler.scale(loss).backward()`, also if the scaled loss has a name."""
    return None if event.argument is None else _scale_call(event.argument, event.env)


def _scale_call(expr: ast.expr, env: Env, depth: int = 0) -> str | None:
    if isinstance(expr, ast.Call) and last_part(expr.func) == "scale":
        owner = expr.func.value if isinstance(expr.func, ast.Attribute) else None
        if owner is not None and "scaler" in text(owner).lower():
            return text(owner)
    name = dotted(expr)
    if name is not None and depth < 3:
        for definition in env.get(name, ()):
            found = _scale_call(definition.expr, definition.env, depth + 1)
            if found is not None:
                return found
    return None


def _fix(
    window: LoopWindow, clip: Event, source: Event, events: list[Event], unscales: list[Event]
) -> tuple[Edit, ...]:
    steps = [e for e in events if e.kind == "step" and e.detail == "scaler"]
    if len(steps) != 1 or unscales or steps[0].receiver is None:
        return ()
    # Unscaling twice in a window raises, so the clip must be where the step is.
    same_place = window.when(clip) == window.when(steps[0]) and clip.loops == steps[0].loops
    if not same_place or not isinstance(clip.stmt, ast.Expr) or clip.stmt.value is not clip.node:
        return ()
    # The scaler may exist on the step's branch only.
    if not steps[0].conditions(window.loop) <= clip.conditions(window.loop):
        return ()
    call = f"{_scaler(source)}.unscale_({text(steps[0].receiver)})"
    return (Edit.at("before", clip.stmt, call),)
