"""Gradients are cleared between the backward that made them and the step.

The optimizer steps with no gradient, or with that of the last micro-batch alone. Clear after the
step, or before the first backward of a window.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..model import Event, File, Guard, LoopWindow
from ..model.expressions import text
from .rule_base import Report, cleared_last, closing_steps, is_optimizer_of, rule


@rule("cleared before the step")
def check(file: File) -> Iterator[Report]:
    """Yield clearing calls between a backward and its step."""
    for window in file.windows:
        unknown = window.loop.virtual and window.shape == "plain"
        if unknown or window.shape in {"deepspeed", "last_only"}:
            continue
        steps = closing_steps(window)
        for zero in _zeros(window):
            step = _step_after(zero, steps, window)
            if _clears_the_others(zero, window):
                yield Report(
                    zero.node,
                    "on the last micro-batch of a window Accelerate lets this through, and the "
                    "gradients of the others are lost; clear after the step",
                )
                break
            if step is not None:
                yield Report(
                    zero.node,
                    f"gradients are cleared before `{text(step.node)}` uses them: clear after it",
                )
            elif zero is cleared_last(window) and not window.boundary.after_first:  # type: ignore[union-attr]
                yield Report(
                    zero.node,
                    "gradients are cleared just before the last backward of the window: only that "
                    "micro-batch counts; clear after the step",
                )


def _clears_the_others(zero: Event, window: LoopWindow) -> bool:
    """True for a clearing inside `accumulate()` before the backward: only the last one counts."""
    if window.shape != "accelerate" or window.when(zero) != "always":
        return False
    inside = any("accumulate(" in c.made for c in zero.contexts(window.loop))
    first = all(zero.order < backward.order for backward in window.of("backward"))
    return inside and first and is_optimizer_of(zero, window.of("step"))


def _zeros(window: LoopWindow) -> list[Event]:
    if window.shape == "nested":
        return [e for e in window.after if e.kind == "zero" and e.loops == window.loop.parents]
    return window.of("zero")


def _step_after(zero: Event, steps: list[Event], window: LoopWindow) -> Event | None:
    """Return the step that could use the gradients that are cleared just before it."""
    later = [*window.of("backward"), *(e for e in window.after if e.kind == "backward")]
    # An earlier step of the same optimizer has used the gradients cleared here.
    used = any(s.order < zero.order and not s.excludes(zero) for s in steps)
    made = [b for b in window.backwards if b.order < zero.order and not b.excludes(zero)]
    for step in steps if is_optimizer_of(zero, steps) and not used else ():
        if _holds_others(zero, step) or step.order < zero.order or zero.excludes(step):
            continue
        if step.loops != zero.loops or window.when(zero) != window.when(step):
            continue
        # Not where the update is skipped, and not before another backward.
        again = any(zero.order < b.order < step.order for b in later)
        useful = not all(b.excludes(step) for b in made)
        if _conditions(zero) <= _conditions(step) and useful and not again:
            return step
    return None


def _conditions(event: Event) -> set[tuple[str, bool]]:
    return {g.key for g in event.path if isinstance(g, Guard)}


def _holds_others(zero: Event, step: Event) -> bool:
    """True if the optimizer holds the parameters of another model than the cleared one."""
    made = " ".join(text(d.expr) for d in step.env.get(step.receiver_text, ()))
    owner = f"{zero.receiver_text}."
    return zero.receiver_text != step.receiver_text and "parameters(" in made and owner not in made
