"""The notes: a file accumulates in a way that the rules do not understand, or is not PyTorch.

A run sees what reading cannot: `wholebatch verify train.py` compares the update of the
real loop with that of the undivided batch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.call_kinds import holds_sync
from ..model.expressions import is_accumulation_name, is_binary, is_call, keyword, text
from ..model.loss_origin import Chain
from .rule_base import Report, framework_accumulates, framework_steps

_DIVISIONS = (ast.Mod, ast.Div, ast.FloorDiv)
# The criteria of torch, by their full names: these modules have no other names of this form.
_CRITERION = re.compile(
    r"torch\.(nn|nn\.functional|functional)\.(\w+Loss|\w+_loss|kl_div|\w*cross_entropy\w*)"
)


def not_understood(file: File, path: str) -> Report | None:
    """Return the note at the first backward that is not understood, or None."""
    for node in (*_unread_backwards(file), *_unknown_losses(file), *_trained_elsewhere(file)):
        return Report(
            node,
            f"this loop accumulates and was not understood: run `wholebatch verify {path}`",
        )
    return None


def not_pytorch(file: File) -> Report | None:
    """Return the note at the first `tf.GradientTape`, or None."""
    for call in file.facts.calls:
        if file.facts.full_name(call.func) in {"tensorflow.GradientTape", "GradientTape"}:
            return Report(call, "a tf.GradientTape loop is not read: the rules are for PyTorch")
    return None


def _unread_backwards(file: File) -> Iterator[ast.AST]:
    """Yield the backwards of loops that accumulate, but are no known windows."""
    read = {id(event.node) for window in file.accumulating for event in window.inner}
    for window in (*file.unread, *file.shaped("plain")):
        for event in window.inner:
            # Beside its own step a backward makes an update by itself.
            if id(event.node) in read or _has_own_step(event, window):
                continue
            if _waits(event, window) or _counts_micro_batches(event, window):
                yield event.node


def _has_own_step(event: Event, window: LoopWindow) -> bool:
    """True if the optimizer that steps after this backward does so whenever it runs."""
    depth = len(event.loops)
    steps = [e for e in window.of("step", "engine_step") if e.loops[:depth] == event.loops]
    steps = [e for e in steps if e.order > event.order] or steps
    return any(not _may_wait(step, event, window) for step in steps)


def _may_wait(event: Event, backward: Event, window: LoopWindow) -> bool:
    """True if an event has conditions, other than those of a backward, that can change."""
    mine = backward.conditions(window.loop)
    guards = [g for g in event.guards(window.loop) if g.key not in mine]
    return any(map(window.may_wait, guards))


def _waits(event: Event, window: LoopWindow) -> bool:
    """True if every step of a loop waits for a condition, and so does the clearing."""
    if window.loop.virtual:
        return False
    steps, clears = window.of("step", "engine_step"), window.of("clear")
    return bool(steps) and all(_may_wait(e, event, window) for e in (*steps, *clears))


def _counts_micro_batches(event: Event, window: LoopWindow) -> bool:
    """True if the loop counts micro-batches per update, or holds DDP's reduction."""
    contexts = event.contexts(window.loop)
    if any("accumulate" in c.names or holds_sync(c) for c in contexts):
        return True
    reached = window.facts.reached(window.loop.node)
    nodes = [node for start in reached for node in ast.walk(start)]
    # A step function that is called elsewhere: another method may divide the loss.
    return any(map(_is_count, window.around.nodes if window.loop.virtual else nodes))


def _is_count(node: ast.AST) -> bool:
    if is_binary(node, *_DIVISIONS):
        return is_accumulation_name(text(node.right))
    if isinstance(node, ast.Compare):
        return any(is_accumulation_name(text(side)) for side in (node.left, *node.comparators))
    return is_call(node, "range") and any(is_accumulation_name(text(a)) for a in node.args)


def _unknown_losses(file: File) -> Iterator[ast.AST]:
    """Yield the backwards of losses that other files compute: nothing tells what they are."""
    for window in file.accumulating:
        for event, chain in window.chains:
            if not _is_seen(chain, window):
                yield event.node


def _is_seen(chain: Chain, window: LoopWindow) -> bool:
    """True if the file shows over what a loss is a mean: by torch's own criteria, or by hand."""
    if {"mean", "sum"} & chain.reducers or any(window.is_own(d) for d in chain.divisors):
        return True
    call = chain.base_call
    if call is None:
        return False
    makers = [call, *(m for m, _ in window.makers(text(call.func), chain.base_env))]
    return any(_CRITERION.fullmatch(window.facts.full_name(maker.func)) for maker in makers)


def _trained_elsewhere(file: File) -> Iterator[ast.AST]:
    """Yield the call that makes Lightning accumulate a step of another file."""
    if framework_accumulates(file) and not any(True for _ in framework_steps(file)):
        trainers = [c for c in file.facts.calls if is_call(c, "Trainer")]
        yield from (c for c in trainers if keyword(c, "accumulate_grad_batches") is not None)
