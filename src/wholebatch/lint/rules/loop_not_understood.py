"""The note for a file that accumulates in a way that the rules do not understand.

A run sees what reading cannot: `wholebatch verify train.py` compares the update of the
real loop with that of the undivided batch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.events import Env, role
from ..model.expressions import dotted, is_accumulation_name, is_binary, is_call, text
from ..model.loss_origin import Chain
from .rule_base import Report, framework_accumulates, framework_steps

_BACKWARDS = ("backward", "manual_backward", "loss_scaler")
_TORCH = {"torch", "nn", "F", "functional"}
_DIVISIONS = (ast.Mod, ast.Div, ast.FloorDiv)


def not_understood(file: File, path: str) -> Report | None:
    """Return the note at the first backward that is not understood, or None."""
    for node in (*_unread_backwards(file), *_unknown_losses(file), *_trained_elsewhere(file)):
        return Report(
            node,
            f"this loop accumulates and was not understood: run `wholebatch verify {path}`",
        )
    return None


def _unread_backwards(file: File) -> Iterator[ast.AST]:
    """Yield the backwards of no known loop, if the file accumulates."""
    # Beside a loop that accumulates, one with an update for every batch is what it seems.
    windows = file.windows if file.accumulating else file.shaped("last_only")
    known = {id(event.node) for window in windows for event in window.inner}
    backwards = [c for c in file.facts.made(*_BACKWARDS) if id(c) not in known]
    if backwards and any(map(_accumulates, file.facts.nodes)):
        yield from backwards


def _accumulates(node: ast.AST) -> bool:
    """True if a node counts micro-batches per update, or steps once in a number of iterations."""
    if is_binary(node, *_DIVISIONS):
        return is_accumulation_name(text(node.right))
    if isinstance(node, ast.Compare):
        return any(is_accumulation_name(text(side)) for side in (node.left, *node.comparators))
    if is_call(node, "range"):
        return any(is_accumulation_name(text(a)) for a in node.args)
    if isinstance(node, ast.If) and "%" in text(node.test):
        calls = [n for stmt in node.body for n in ast.walk(stmt) if is_call(n, "step")]
        owners = [c.func.value for c in calls if isinstance(c.func, ast.Attribute)]
        return any(role(owner, Env()) in {"optimizer", "scaler"} for owner in owners)
    return is_call(node, "accumulate")


def _unknown_losses(file: File) -> Iterator[ast.AST]:
    """Yield the backwards of losses that other files compute: nothing tells what they are."""
    for window in file.accumulating:
        for event, chain in window.chains:
            if not _is_seen(chain, window):
                yield event.node


def _is_seen(chain: Chain, window: LoopWindow) -> bool:
    """True if the file shows over what a loss is a mean: by torch's own criteria, or by hand."""
    if "mean" in chain.reducers or any(window.is_own(d) for d in chain.divisors):
        return True
    call = chain.base_call
    if call is None:
        return False
    made = [call, *(m for m, _ in window.makers(text(call.func), chain.base_env))]
    names = [dotted(m.func) or "" for m in made]
    imported = [f"torch.nn.{n}" for n in names] + [f"torch.nn.functional.{n}" for n in names]
    of_torch = any(n.partition(".")[0] in _TORCH for n in names)
    return of_torch or not window.facts.imports.isdisjoint(imported)


def _trained_elsewhere(file: File) -> Iterator[ast.AST]:
    """Yield the call that makes Lightning accumulate a step of another file."""
    if framework_accumulates(file) and not any(True for _ in framework_steps(file)):
        yield from (c for c in file.facts.made("Trainer") if "accumulate_grad" in text(c))
