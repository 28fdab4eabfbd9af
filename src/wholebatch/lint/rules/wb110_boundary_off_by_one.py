"""The boundary is off by one: the first window has the wrong number of micro-batches."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.expressions import is_binary, number, text
from .rule_base import Edit, Report, rule, stepped


@rule(
    "WB110",
    "boundary off by one",
    "The condition that ends a window is true one micro-batch too early or too late.",
    fixable=True,
)
def check(file: File) -> Iterator[Report]:
    """Yield boundaries whose first window does not have K micro-batches."""
    for window in file.accumulating:
        boundary = window.boundary
        if window.shape != "boundary" or boundary is None or boundary.shift is None:
            continue
        if boundary.kind not in {"modulo", "reset"}:
            continue
        size = first_window(window)
        if not size:
            continue
        name = window.count_name
        words = "one micro-batch" if size == "one" else f"`{name}` {size} micro-batches"
        yield Report(
            boundary.expr,
            f"boundary is off by one: the first window has {words} instead of `{name}`; "
            "count micro-batches from 1",
            _fix(window) if size == "one" else (),
        )


def first_window(window: LoopWindow) -> str:
    """Return the error in the first window's size: "" if none, "one", "+ 1", "- 1" and so on."""
    boundary = window.boundary
    assert boundary is not None
    assert boundary.shift is not None
    shift = boundary.shift
    steps = stepped(window)
    # A step at the top of the body closes the window of the iterations before.
    if steps and window.backwards and steps[0].order < window.backwards[0].order:
        shift -= 1
        if boundary.after_first:
            return ""
    elif shift == 1 and boundary.kind == "modulo" and not boundary.after_first:
        return "one"
    if shift == 0:
        return ""
    return f"{'+' if shift > 0 else '-'} {abs(shift)}"


def _is_alone(window: LoopWindow) -> bool:
    """True if this one condition decides all that happens once per window."""
    events = window.of("step", "zero", "sched", "clip", "unscale", "scaler_update")
    at_boundary = [e for e in events if window.when(e) in {"boundary", "inside"}]
    return all(
        any(guard.expr is window.boundary.expr for guard in e.guards(window.loop))  # type: ignore[union-attr]
        for e in at_boundary
    )


def _fix(window: LoopWindow) -> tuple[Edit, ...]:
    boundary = window.boundary
    if boundary is None or boundary.tail or boundary.after_first or not _is_alone(window):
        return ()
    # `i % k == 0` with an enumerate from 0: write `(i + 1)` instead of `i`.
    expr = boundary.expr
    if not isinstance(expr, ast.Compare):
        return ()
    left = expr.left
    if not is_binary(left, ast.Mod) or not isinstance(left.left, ast.Name):
        return ()
    if number(expr.comparators[0]) != 0 or not isinstance(expr.ops[0], ast.Eq):
        return ()
    return (Edit.at("replace", left.left, f"({text(left.left)} + 1)"),)
