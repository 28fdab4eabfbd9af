"""Gradients are cleared on every micro-batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.expressions import text
from .rule_base import Edit, Report, is_divided, is_optimizer_of, rule, same_receiver, stepped


@rule(
    "WB104",
    "gradients cleared every micro-batch",
    "zero_grad runs for every micro-batch, so only the last one of a window counts.",
    fixable=True,
)
def check(file: File) -> Iterator[Report]:
    """Yield every clearing call that is not at the boundary."""
    for window in file.shaped("boundary", "nested"):
        steps = stepped(window)
        zeros = window.of("zero")
        for zero in zeros:
            if not is_optimizer_of(zero, steps) or not _every_micro_batch(zero, window, steps):
                continue
            yield Report(
                zero.node,
                f"gradients are cleared on every micro-batch but used every "
                f"`{window.count_name}`: only the last micro-batch counts; clear once, "
                "after the step",
                _fix(window, zero, zeros, steps),
            )


def _every_micro_batch(zero: Event, window: LoopWindow, steps: list[Event]) -> bool:
    """True if it runs on every micro-batch: unconditionally, or under conditions of its step."""
    if window.when(zero) == "always":
        return True
    if window.when(zero) != "sometimes":
        return False
    mine = _conditions(zero, window)
    return any(same_receiver(zero, s) and mine <= _conditions(s, window) for s in steps)


def _conditions(event: Event, window: LoopWindow) -> set[tuple[str, bool]]:
    return {(text(g.expr), g.positive) for g in event.guards(window.loop)}


def _fix(
    window: LoopWindow, zero: Event, zeros: list[Event], steps: list[Event]
) -> tuple[Edit, ...]:
    if window.shape != "boundary" or len(steps) != 1 or not isinstance(zero.stmt, ast.Expr):
        return ()
    # Without the division, the gradient of one micro-batch would become the sum of all.
    if not is_divided(window) or len(zeros) > 2:
        return ()
    if zero.loops != steps[0].loops or zero.stmt.value is not zero.node:
        return ()
    cleared = any(window.when(z) == "boundary" and z.order > steps[0].order for z in zeros)
    edits = [Edit.at("delete", zero.stmt)]
    if not cleared:
        last = steps[0].stmt
        for update in window.of("scaler_update"):
            if window.when(update) == "boundary" and update.order > steps[0].order:
                last = update.stmt
        edits.append(Edit.at("after", last, text(zero.stmt)))
    return tuple(edits)
