"""The condition that ends a window is true one micro-batch too early or too late."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.expressions import is_binary, number, text
from ..model.window_boundary import Boundary
from .rule_base import Edit, Report, is_right, rule, stepped


@rule("boundary off by one", fixable=True)
def check(file: File) -> Iterator[Report]:
    """Yield boundaries whose first window does not have K micro-batches."""
    for window in file.shaped("boundary"):
        boundary = window.boundary
        if boundary is None or boundary.shift is None or boundary.kind not in {"modulo", "reset"}:
            continue
        size = _first_window(window, boundary, boundary.shift)
        if size:
            name = window.count_name
            words = "one micro-batch" if size == "one" else f"`{name}` {size} micro-batches"
            yield Report(
                boundary.expr,
                f"boundary is off by one: the first window has {words} instead of `{name}`; "
                "count micro-batches from 1",
                _fix(window, boundary) if size == "one" and is_right(window) else (),
            )


def _first_window(window: LoopWindow, boundary: Boundary, shift: int) -> str:
    """Return the error in the first window's size: "" if none, "one", "+ 1", "- 1" and so on."""
    steps = stepped(window)
    # A step at the top of the body closes the window of the iterations before.
    if steps and window.backwards and steps[0].order < window.backwards[0].order:
        shift = 0 if boundary.after_first else shift - 1
    elif shift == 1 and boundary.kind == "modulo" and not boundary.after_first:
        return "one"
    return f"{'+' if shift > 0 else '-'} {abs(shift)}" if shift else ""


def _fix(window: LoopWindow, boundary: Boundary) -> tuple[Edit, ...]:
    events = window.of("step", "zero", "sched", "clip", "unscale", "scaler_update")
    # This one condition must decide all that happens once per window.
    alone = all(
        any(guard.expr is boundary.expr for guard in e.guards(window.loop))
        for e in events
        if window.when(e) in {"boundary", "inside"}
    )
    # A helper may be called from elsewhere too.
    helped = boundary.expr.lineno > (window.loop.node.end_lineno or 0)
    if boundary.tail or boundary.after_first or boundary.spanning or helped or not alone:
        return ()
    # `i % k == 0` with an enumerate from 0: write `(i + 1)` instead of `i`.
    expr = boundary.expr
    left = expr.left if isinstance(expr, ast.Compare) else None
    if not is_binary(left, ast.Mod) or not isinstance(left.left, ast.Name):
        return ()
    if number(expr.comparators[0]) != 0 or not isinstance(expr.ops[0], ast.Eq):  # type: ignore[attr-defined]
        return ()
    return (Edit.at("replace", left.left, f"({text(left.left)} + 1)"),)
