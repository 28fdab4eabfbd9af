"""Gradients are clipped while they are still multiplied by the loss scale."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.events import Env
from ..model.expressions import dotted, is_call, text
from .rule_base import Edit, Report, rule

_UNSCALES_ITSELF = re.compile(
    r"accelerator|fabric|scaler|amp\.|trainer|^self\.clip_gradients ?$", re.I
)


@rule("clipped before unscale", fixable=True)
def check(file: File) -> Iterator[Report]:
    """Yield clipping after a scaled backward without unscaling in between."""
    for window in file.windows:
        events = [*window.events, *window.after] if window.shape == "nested" else window.events
        for clip in (e for e in events if e.kind == "clip"):
            before = [e for e in events if e.order < clip.order and not e.excludes(clip)]
            scalers = [_scaler(e) for e in before if e.kind == "backward"]
            scaler = next((found for found in reversed(scalers) if found), None)
            if scaler is None or any(e.kind == "unscale" for e in before) or _unscales(clip):
                continue
            yield Report(
                clip.node,
                "gradients are clipped while still multiplied by the loss scale: call "
                f"`{scaler}.unscale_(optimizer)` first",
                _fix(window, clip, scaler, events) if window.alone else (),
            )


def _unscales(clip: Event) -> bool:
    """True if what clips, or its parameters, is unscaled: `amp.master_params(optimizer)`."""
    call = clip.node
    if not isinstance(call, ast.Call):
        return False
    scaled = any("scale" in text(part) for part in (*call.args[1:], *call.keywords))
    return scaled or bool(_UNSCALES_ITSELF.search(" ".join(map(text, [call.func, *call.args[:1]]))))


def _scaler(event: Event) -> str | None:
    """Return the scaler of `scaler.scale(loss).backward()`, also if the scaled loss has a name."""
    return None if event.argument is None else _scale_call(event.argument, event.env)


def _scale_call(expr: ast.expr, env: Env, depth: int = 0) -> str | None:
    if is_call(expr, "scale") and isinstance(expr.func, ast.Attribute):
        owner = text(expr.func.value)
        if "scaler" in owner.lower():
            return owner
    defs = env.get(dotted(expr) or "", ()) if depth < 3 else ()
    return next((s for d in defs if (s := _scale_call(d.expr, d.env, depth + 1))), None)


def _fix(window: LoopWindow, clip: Event, scaler: str, events: list[Event]) -> tuple[Edit, ...]:
    steps = [e for e in events if e.kind == "step" and e.detail == "scaler"]
    if len(steps) != 1 or any(e.kind == "unscale" for e in events) or steps[0].receiver is None:
        return ()
    # Unscaling twice in a window raises, so the clip must be where the step is.
    same_place = window.when(clip) == window.when(steps[0]) and clip.loops == steps[0].loops
    if not same_place or not isinstance(clip.stmt, ast.Expr) or clip.stmt.value is not clip.node:
        return ()
    # The scaler may exist on the step's branch only.
    if not steps[0].conditions(window.loop) <= clip.conditions(window.loop):
        return ()
    return (Edit.at("before", clip.stmt, f"{scaler}.unscale_({text(steps[0].receiver)})"),)
