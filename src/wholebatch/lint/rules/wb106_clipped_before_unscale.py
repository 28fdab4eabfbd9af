"""Gradients are clipped while they are still multiplied by the loss scale.

The norm is thousands of times too large, so every update is clipped to almost nothing, and by
another factor whenever the scale changes. Call `scaler.unscale_(optimizer)` before clipping.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File
from ..model.events import Env
from ..model.expressions import dotted, is_call, text, values_of
from .rule_base import Report, rule

_UNSCALES_ITSELF = re.compile(r"accelerator|fabric|scaler|amp\.|trainer", re.I)


@rule("clipped before unscale")
def check(file: File) -> Iterator[Report]:
    """Yield clipping after a scaled backward without unscaling in between."""
    for window in file.windows:
        events = [*window.events, *window.after] if window.shape == "nested" else window.events
        for clip in (e for e in events if e.kind == "clip"):
            before = [e for e in events if e.order < clip.order and not e.excludes(clip)]
            scalers = [_scaler(e.argument, e.env) for e in before if e.kind == "backward"]
            scaler = next((found for found in reversed(scalers) if found), None)
            if scaler is None or any(e.kind == "unscale" for e in before) or _unscales(clip):
                continue
            yield Report(
                clip.node,
                "gradients are clipped while still multiplied by the loss scale: call "
                f"`{scaler}.unscale_(optimizer)` first",
            )


def _unscales(clip: Event) -> bool:
    """True if what clips, or its parameters, is unscaled: `amp.master_params(optimizer)`."""
    call = clip.node
    if not isinstance(call, ast.Call) or dotted(call.func) == "self.clip_gradients":
        return True
    scaled = any("scale" in text(part) for part in values_of(call)[1:])
    return scaled or bool(_UNSCALES_ITSELF.search(" ".join(map(text, [call.func, *call.args[:1]]))))


def _scaler(expr: ast.expr | None, env: Env, depth: int = 0) -> str | None:
    """Return the scaler of `scaler.scale(loss).backward()`, also if the scaled loss has a name."""
    if is_call(expr, "scale") and isinstance(expr.func, ast.Attribute):
        owner = text(expr.func.value)
        if "scaler" in owner.lower():
            return owner
    defs = env.get(dotted(expr) or "", ()) if depth < 3 else ()
    return next((s for d in defs if (s := _scaler(d.expr, d.env, depth + 1))), None)
