"""Micro-batches are counted where updates are meant."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.events import Env
from ..model.expressions import (
    is_accumulation_name,
    is_call,
    keyword,
    last_part,
    number,
    positional,
    text,
    walk,
)
from ..model.window_boundary import peel
from .rule_base import Report, exclusive, rule

_UPDATES = re.compile(
    r"(^|[._])(global_?steps?|num_updates|n_updates|updates|update_steps?|optim(izer)?_steps?"
    r"|opt_steps?|total_updates|completed_steps)$",
    re.I,
)
_LIMIT = re.compile(
    r"max_(train_)?steps|t_total|total_steps|num_train(ing)?_(optimization_)?steps|max_updates"
    r"|num_updates|train_steps|total_updates|max_train_steps",
    re.I,
)
_LENGTH_OPTIONS = (
    "num_training_steps", "t_total", "total_steps", "T_max", "total_iters", "num_steps",
    "steps_per_epoch",
)  # fmt: skip
_POSITIONS = {"CosineAnnealingLR": 1, "OneCycleLR": 2}
_LENGTH = re.compile(
    r"\blen\([\w.\[\]'\"]*(loader|dataloader|dl|batches|iterator|dataset)\w*\)", re.I
)


@rule(
    "WB116",
    "micro-batches counted as updates",
    "A schedule or a counter counts micro-batches where updates are meant.",
)
def check(file: File) -> Iterator[Report]:
    """Yield the schedules and counters of each window that count micro-batches."""
    for window in file.accumulating:
        yield from _schedules(window)
        yield from _counters(window)


def _schedules(window: LoopWindow) -> Iterator[Report]:
    if window.shape not in {"boundary", "nested"}:
        return
    events = window.of("sched")
    if window.shape == "nested":
        events = [e for e in window.after if e.kind == "sched" and e.loops == window.loop.parents]
    seen: set[int] = set()
    for event in events:
        if window.when(event) not in {"boundary", "outside"} or event.receiver is None:
            continue
        for made in event.env.get(text(event.receiver), ()):
            call = made.expr
            if not isinstance(call, ast.Call) or id(call) in seen or window.shape == "nested":
                continue
            seen.add(id(call))
            length = _length(call)
            if length is not None and _counts_micro_batches(length, made.env, window):
                yield Report(
                    call,
                    f"schedule is as long as the micro-batches but steps once every "
                    f"`{window.count_name}`: divide its length by it",
                )


def _length(call: ast.Call) -> ast.expr | None:
    for name in _LENGTH_OPTIONS:
        given = keyword(call, name)
        if given is not None:
            return given
    if re.match(r"get_\w*schedule", last_part(call.func)):
        return positional(call, 2)
    at = _POSITIONS.get(last_part(call.func))
    if at is None and re.match(r"\w*Warmup\w*(Scheduler|Schedule|LR)$", last_part(call.func)):
        at = 2  # The usual signature: (optimizer, warm-up, length).
    return None if at is None else positional(call, at)


def _counts_micro_batches(expr: ast.expr, env: Env, window: LoopWindow) -> bool:
    """True if the length counts batches of a loader and is nowhere divided by the window."""
    spelled = _spellings(expr, env)
    if any(is_accumulation_name(s) or _has_count(s, window) for s in spelled):
        return False
    if text(expr) in _times(window):
        return True
    # A loader that is cut to whole windows already counts updates.
    return any(_LENGTH.search(s) and "//" not in s for s in spelled)


def _times(window: LoopWindow) -> set[str]:
    """Return the loop's number of iterations as text, if it is written: `range(total)`."""
    iterable = peel(window.loop.iterable, window.loop.entry)
    if not is_call(iterable, "range", "trange"):
        return set()
    return {text(a) for a in iterable.args[-1:] if number(a) is None}


def _has_count(spelled: str, window: LoopWindow) -> bool:
    name = window.every_name
    if not window.every_key:
        return False
    if window.every is not None and number(window.every) is not None:
        # With a literal count, only a division by it is evidence, not any 4 in the text.
        return bool(re.search(rf"/ *{re.escape(name)}(?![\w.])", spelled))
    return bool(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", spelled))


def _spellings(expr: ast.expr, env: Env, depth: int = 0) -> list[str]:
    found = [text(expr)]
    if depth > 4:
        return found
    for node in walk(expr):
        if isinstance(node, (ast.Name, ast.Attribute)):
            for definition in env.get(text(node), ()):
                if text(definition.expr) != text(node):
                    found += _spellings(definition.expr, definition.env, depth + 1)
    return found


def _counters(window: LoopWindow) -> Iterator[Report]:
    for event in window.of("augment"):
        if not isinstance(event.stmt, ast.AugAssign) or window.when(event) != "always":
            continue
        name = text(event.stmt.target)
        if not _UPDATES.search(name) or text(event.stmt.value) != "1":
            continue
        if _is_the_clock(name, window) or not _is_compared(name, window):
            continue
        if all(exclusive(event, step) for step in window.of("step")):
            continue  # On a branch of its own, without the optimizer.
        yield Report(
            event.node,
            f"`{name}` goes up on every micro-batch but is compared with a number of updates: "
            f"it runs `{window.count_name}` times too fast; count it where the optimizer steps",
        )


def _is_the_clock(name: str, window: LoopWindow) -> bool:
    """True if the boundary uses this counter, so that it counts micro-batches on purpose."""
    return window.boundary is not None and bool(
        re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", text(window.boundary.expr))
    )


def _is_compared(name: str, window: LoopWindow) -> bool:
    outer = window.loop.parents[0].node if window.loop.parents else window.loop.node
    for node in walk(outer):
        if not isinstance(node, ast.Compare) or len(node.comparators) != 1:
            continue
        sides = {text(node.left), text(node.comparators[0])}
        if name in sides and any(_LIMIT.search(s) for s in sides - {name}):
            return True
    return False
