"""Clipping: once per window, of gradients that are no longer multiplied by AMP's loss scale."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..normalise import Event, NormalFile
from ..normalise.syntax import dotted, is_call, keyword, names_in, shown, text, values_of
from ..windows import File, Window
from ..windows.values import iterated
from .rule_base import ERROR, NOTE, Report, rule

_UNSCALES_ITSELF = re.compile(r"accelerator|fabric|scaler|amp\.|trainer", re.I)


@rule("WB105", "clipped every micro-batch", "error or note")
def clipped_every_micro_batch(file: File) -> Iterator[Report]:
    """Gradients are clipped for every micro-batch instead of once per update.

    Clipping the sum so far shrinks the early micro-batches again and again: the update has another
    direction than that of the batch. Clip once per window, just before the step.
    """
    yield from _in_windows_of_wholebatch(file.normal)
    for window in file.accumulating:
        # Not those on a branch without a backward of this window.
        clips = [c for c in window.of("clip") if not all(c.excludes(b) for b in window.backwards)]
        for clip in clips:
            if window.when(clip) != "always":
                continue
            if window.shape == "accelerate" and not clip.in_accumulate:
                continue
            yield Report(
                clip.node,
                "gradients are clipped on every micro-batch: clip once, at the end of the window, "
                "before the optimizer steps",
                window.level,
            )


def _in_windows_of_wholebatch(file: NormalFile) -> Iterator[Report]:
    """Yield the clipping calls in a loop over `acc.over(loader)`, which `acc` updates itself."""
    for clip in (e for e in file.events if e.kind == "clip"):
        over = [iterated(loop, file) for loop in clip.loops if not loop.virtual]
        owners = [o.func.value for o in over if is_call(o, "over") and _is_method(o)]  # type: ignore[attr-defined]
        makers = [maker for owner in owners for maker in file.reader.made_by(owner)]
        ours = [maker for maker in makers if is_call(maker, "Accumulator") and len(maker.args) > 1]
        updating = [maker for maker in ours if text(maker.args[1]) != "None"]
        call = clip.node
        handed = names_in(*call.args[:1]) if isinstance(call, ast.Call) else frozenset()
        if any(names_in(m.args[0]) & handed for m in updating):
            yield Report(
                call,
                "the last backward of a window makes the update and clears the gradients, so "
                "there is none to clip after it: give wb.Accumulator clip_norm=, or "
                "close=wb.Close(clip_value=...)",
            )


def _is_method(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute)


@rule("WB106", "clipped before unscale", "error or note")
def clipped_before_unscale(file: File) -> Iterator[Report]:
    """Gradients are clipped while they are still multiplied by the loss scale.

    The norm is thousands of times too large, so every update is clipped to almost nothing, and by
    another factor whenever the scale changes. Call `scaler.unscale_(optimizer)` before clipping. It
    is a note where the scaler may be disabled.
    """
    for window in file.windows:
        events = [*window.events, *window.after] if window.shape == "nested" else window.events
        for clip in (e for e in events if e.kind == "clip"):
            before = [e for e in events if e.order < clip.order and not e.excludes(clip)]
            scalers = [_scaler(e, window) for e in before if e.kind == "backward"]
            scaler = next((owner for owner in reversed(scalers) if owner is not None), None)
            if scaler is None or any(e.kind == "unscale" for e in before) or _unscales(clip):
                continue
            yield Report(
                clip.node,
                "gradients are clipped while still multiplied by the loss scale: call "
                f"`{shown(scaler)}.unscale_(optimizer)` first",
                ERROR if _is_enabled(scaler, window) else NOTE,
            )


def _unscales(clip: Event) -> bool:
    """True if what clips, or its parameters, is unscaled: `amp.master_params(optimizer)`."""
    call = clip.node
    if not isinstance(call, ast.Call) or dotted(call.func) == "self.clip_gradients":
        return True
    scaled = any("scale" in text(part) for part in values_of(call)[1:])
    return scaled or bool(_UNSCALES_ITSELF.search(" ".join(map(text, [call.func, *call.args[:1]]))))


def _is_enabled(scaler: ast.expr, window: Window) -> bool:
    """True if the file makes the scaler, and does not ask whether to enable it."""
    makers = window.file.reader.made_by(scaler)
    options = [keyword(call, "enabled") for call in makers if is_call(call, "GradScaler")]
    return bool(options) and all(o is None or text(o) == "True" for o in options)


def _scaler(backward: Event, window: Window) -> ast.expr | None:
    """Return the scaler of `scaler.scale(loss).backward()`, also if the scaled loss has a name."""
    scaled = window.file.value(backward.argument)
    if is_call(scaled, "scale") and isinstance(scaled.func, ast.Attribute):
        owner = scaled.func.value
        makers = window.file.reader.made_by(owner)
        if "scaler" in text(owner).lower() or any(is_call(m, "GradScaler") for m in makers):
            return owner
    return None
