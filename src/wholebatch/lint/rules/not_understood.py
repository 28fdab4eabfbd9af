"""The note: a file accumulates in a way that the rules do not understand, or is not PyTorch.

A run sees what reading cannot: `wholebatch verify train.py` compares the update of the
real loop with that of the undivided batch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..normalise import Event
from ..normalise.syntax import is_accumulation_name, is_binary, is_call, shown
from ..windows import File, Window
from ..windows.window import is_held
from .rule_base import NOTE, Report

_DIVISIONS = (ast.Mod, ast.Div, ast.FloorDiv)


def not_understood(file: File) -> Report | None:
    """Return the note at the first backward that is not understood, or None."""
    for node in _unread_backwards(file):
        return Report(node, "this loop accumulates and was not understood", NOTE)
    for call in file.normal.index.calls_by_name.get("GradientTape", ()):
        return Report(call, "a tf.GradientTape loop is not read: the rules are for PyTorch", NOTE)
    return None


def _unread_backwards(file: File) -> Iterator[ast.AST]:
    """Yield the backwards of loops that accumulate, but are no known windows."""
    read = {event.order for window in file.accumulating for event in window.inner}
    for window in (*file.unread, *file.shaped("plain")):
        steps, clears = window.of("step"), window.of("clear")
        for event in window.inner:
            # Beside its own step a backward makes an update by itself.
            if event.order in read or any(_comes_with(e, event, window) for e in steps):
                continue
            waits = bool(steps) and not any(_comes_with(e, event, window) for e in clears)
            if (waits and not window.loop.virtual) or _counts_micro_batches(event, window):
                yield event.node


def _comes_with(event: Event, backward: Event, window: Window) -> bool:
    """True if an event has no condition, other than those of a backward, that can change."""
    mine = backward.keys(window.loop)
    conditions = [c for c in event.conditions(window.loop) if c.key not in mine]
    same = event.loops[: len(backward.loops)] == backward.loops
    return same and not any(map(window.may_wait, conditions))


def _counts_micro_batches(event: Event, window: Window) -> bool:
    """True if the loop counts micro-batches per update, or holds DDP's reduction."""
    if event.in_accumulate_of(window.loop) or is_held(event, window.loop, window.file):
        return True
    return any(map(_is_count, ast.walk(window.loop.node)))


def _is_count(node: ast.AST) -> bool:
    if is_binary(node, *_DIVISIONS):
        return is_accumulation_name(shown(node.right))
    if isinstance(node, ast.Compare):
        return any(is_accumulation_name(shown(side)) for side in (node.left, *node.comparators))
    return is_call(node, "range") and any(is_accumulation_name(shown(a)) for a in node.args)
