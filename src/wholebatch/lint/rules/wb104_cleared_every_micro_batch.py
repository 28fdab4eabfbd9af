"""zero_grad runs for every micro-batch, so only the last one of a window counts."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.expressions import text, walk
from .rule_base import Edit, Report, is_optimizer_of, is_right, moved, rule, stepped


@rule("gradients cleared every micro-batch", fixable=True)
def check(file: File) -> Iterator[Report]:
    """Yield every clearing call that is not at the boundary."""
    for window in file.shaped("boundary", "nested"):
        steps = stepped(window)
        for zero in window.of("zero"):
            if is_optimizer_of(zero, steps) and _every_micro_batch(zero, window, steps):
                yield Report(
                    zero.node,
                    f"gradients are cleared on every micro-batch but used every "
                    f"`{window.count_name}`: only the last micro-batch counts; clear once, "
                    "after the step",
                    _fix(window, zero, steps) if is_right(window, zero) else (),
                    unsafe=not _is_beside(zero, window),
                )


def _every_micro_batch(zero: Event, window: LoopWindow, steps: list[Event]) -> bool:
    """True if it runs on every micro-batch: unconditionally, or under conditions of its step."""
    mine = zero.conditions(window.loop)
    return window.when(zero) == "always" or (
        window.when(zero) == "sometimes"
        and any(
            zero.receiver_text == s.receiver_text and mine <= s.conditions(window.loop)
            for s in steps
        )
    )


def _fix(window: LoopWindow, zero: Event, steps: list[Event]) -> tuple[Edit, ...]:
    zeros = window.of("zero")
    if not steps or len(zeros) > 2:
        return ()
    updates = [u for u in window.of("scaler_update") if window.when(u) == "boundary"]
    edits = moved(zero, window, "after", max([steps[0], *updates], key=lambda e: e.order))
    cleared = any(window.when(z) == "boundary" and z.order > steps[0].order for z in zeros)
    kept = edits[:1] if cleared else edits
    # Gradients from before the loop, or of an earlier epoch, must not enter its first window.
    spans = window.boundary is not None and window.boundary.spanning and window.loop.parents
    clears = any(e.kind == "zero" and isinstance(e.stmt, ast.Expr) for e in window.before)
    if not edits or spans or not _is_beside(zero, window) or clears:
        return kept
    return (*kept, Edit.at("before", window.loop.node, text(zero.stmt)))


def _is_beside(zero: Event, window: LoopWindow) -> bool:
    """True if it stands in the loop itself; a helper may have other callers."""
    return not window.loop.virtual and any(n is zero.node for n in walk(window.loop.node))
