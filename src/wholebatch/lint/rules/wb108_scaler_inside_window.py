"""The gradient scaler steps or updates inside a window."""

from __future__ import annotations

from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.expressions import text
from .rule_base import Edit, Report, is_right, moved, rule


@rule("scaler off the boundary", fixable=True)
def check(file: File) -> Iterator[Report]:
    """Yield scaler calls, and steps beside a conditional clearing, that are not at the boundary."""
    for window in file.shaped("boundary", "nested"):
        for update in window.of("scaler_update"):
            if window.when(update) == "always":
                yield Report(
                    update.node,
                    "loss scale is updated on every micro-batch: gradients of one window get "
                    "different scales; update it after the step",
                    _fix(window, update) if is_right(window, update) else (),
                )
        cleared = {window.when(zero) for zero in window.of("zero")}
        for step in window.of("step"):
            if window.when(step) == "always" and cleared == {"boundary"}:
                yield Report(
                    step.node,
                    f"`{text(step.node)}` runs on every micro-batch but gradients are cleared "
                    f"every `{window.count_name}`: each step re-uses the earlier ones; step there "
                    "too",
                )


def _fix(window: LoopWindow, update: Event) -> tuple[Edit, ...]:
    steps = [e for e in window.of("step") if e.detail == "scaler"]
    if len(steps) != 1 or len(window.of("scaler_update")) != 1:
        return ()
    return moved(update, window, "after")
