"""The condition that ends a window is true one micro-batch too early or too late.

`i % K == 0` with an `i` from 0 makes an update of the first micro-batch alone, and shifts all
windows. Count micro-batches from 1: `(i + 1) % K == 0`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.window_boundary import Boundary
from .rule_base import Report, closing_steps, rule


@rule("boundary off by one")
def check(file: File) -> Iterator[Report]:
    """Yield boundaries whose first window does not have K micro-batches."""
    for window in file.shaped("boundary"):
        boundary = window.boundary
        if boundary is None or boundary.shift is None or boundary.kind not in {"modulo", "reset"}:
            continue
        size = _first_window(window, boundary, boundary.shift)
        if size:
            name = window.count_name
            words = "one micro-batch" if size == "one" else f"{name} {size} micro-batches"
            yield Report(
                boundary.expr,
                f"boundary is off by one: the first window has {words} instead of {name}; "
                "count micro-batches from 1",
            )


def _first_window(window: LoopWindow, boundary: Boundary, shift: int) -> str:
    """Return the error in the first window's size: "" if none, "one", "+ 1", "- 1" and so on."""
    steps = closing_steps(window)
    # A step at the top of the body closes the window of the iterations before.
    if steps and window.backwards and steps[0].order < window.backwards[0].order:
        shift = 0 if boundary.after_first else shift - 1
    elif shift == 1 and boundary.kind == "modulo" and not boundary.after_first:
        return "one"
    return f"{'+' if shift > 0 else '-'} {abs(shift)}" if shift else ""
