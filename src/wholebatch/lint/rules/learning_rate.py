"""The learning rate's schedule: one step per update, and as long as the updates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.events import Env
from ..model.expressions import (
    has_word,
    is_accumulation_name,
    is_call,
    keyword,
    last_part,
    positional,
    text,
)
from ..model.window_boundary import iterated
from .rule_base import Report, is_prepared, rule

_LENGTH_OPTIONS = (
    "num_training_steps", "t_total", "total_steps", "T_max", "total_iters", "num_steps",
    "steps_per_epoch",
)  # fmt: skip
# The position of the length: (optimizer, warm-up, length) is the usual signature.
_LENGTH_POSITIONS = {"CosineAnnealingLR": 1, "OneCycleLR": 2}
_LOADER_LENGTH = re.compile(
    r"\blen\([\w.\[\]'\"]*(loader|dl|ld|batches|iterator|dataset)\w*(\(\))?\)(?! *//)", re.I
)
# Updates times their micro-batches: `max_train_steps * args.accum`.
_STEPS_TIMES_COUNT = re.compile(r"(steps|total)\w* \* [\w.]*(accum|gas\b)", re.I)
_MAX_NAMES_DEEP = 4


@rule("WB107", "scheduler stepped every micro-batch")
def scheduled_every_micro_batch(file: File) -> Iterator[Report]:
    """The learning-rate schedule steps for every micro-batch instead of every update.

    The schedule goes K times too fast: warm-up and decay end after 1/K of the training. Step it
    where the optimizer steps.
    """
    for window in file.shaped("boundary", "nested", "accelerate"):
        for event in window.of("schedule"):
            call = event.node
            has_argument = isinstance(call, ast.Call) and bool(call.args or call.keywords)
            if window.when(event) != "always" or has_argument:
                continue
            if window.shape == "accelerate" and is_prepared(event, window) is not False:
                continue
            makers = window.makers(text(event.receiver), event.env)
            if any(_may_count_micro_batches(maker, env, window) for maker, env in makers):
                continue
            yield Report(
                event.node,
                f"`{text(event.node)}` runs on every micro-batch: the schedule goes "
                f"{window.count_name} times too fast; step it once per update",
            )


def _may_count_micro_batches(call: ast.Call, env: Env, window: LoopWindow) -> bool:
    """True if a schedule is, or may be, as long as the micro-batches: then each may step it."""
    over = iterated(window.loop)
    limit = text(over.args[-1]) if is_call(over, "range") and over.args else ""
    spelled = _spellings(call, env)
    if last_part(call.func) == "LambdaLR":
        return True  # A function of the step may count whatever it likes.
    if limit[:1].isalpha() and any(has_word(limit, s) for s in spelled):
        return True
    if any(map(_STEPS_TIMES_COUNT.search, spelled)):
        return True
    if any(map(is_accumulation_name, spelled)):
        return False
    return any(_LOADER_LENGTH.search(s) or "steps_per_epoch" in s for s in spelled)


@rule("WB116", "micro-batches counted as updates")
def micro_batches_counted(file: File) -> Iterator[Report]:
    """A schedule is as long as the micro-batches, but steps once per update.

    With `len(loader) * epochs` as its length, the schedule ends K times too late: training stops at
    1/K of it. Divide its length by the number of micro-batches per update.
    """
    for window in file.shaped("boundary", "accelerate"):
        for event in window.of("schedule"):
            prepared = window.shape == "accelerate" and is_prepared(event, window)
            if not prepared and window.when(event) != "boundary":
                continue
            for call, env in window.makers(text(event.receiver), event.env):
                length = _length(call)
                if length is not None and _counts_micro_batches(length, env, window):
                    yield Report(
                        call,
                        "schedule is as long as the micro-batches, but steps once per update: "
                        f"divide its length by {window.count_name}",
                    )


def _length(call: ast.Call) -> ast.expr | None:
    """Return the length that a call gives to a schedule, or None if it is not seen."""
    if call.args and str(getattr(call.args[0], "value", "")).startswith("constant"):
        return None  # `get_scheduler("constant", ...)`: its length means nothing.
    named = [keyword(call, name) for name in _LENGTH_OPTIONS]
    if any(named):
        return next(filter(None, named))
    name = last_part(call.func)
    usual = 2 if "schedule" in name.lower() else None
    at = _LENGTH_POSITIONS.get(name, usual)
    return None if at is None else positional(call, at)


def _counts_micro_batches(length: ast.expr, env: Env, window: LoopWindow) -> bool:
    spelled, count = _spellings(length, env), window.every_name
    if any(map(_STEPS_TIMES_COUNT.search, spelled)):
        return True
    if any(is_accumulation_name(s) or (count and f"/ {count}" in s) for s in spelled):
        return False
    return any(map(_LOADER_LENGTH.search, spelled))


def _spellings(expr: ast.expr, env: Env, depth: int = 0) -> list[str]:
    """Return the text of an expression, and of everything that its names are computed from."""
    spelled = [text(expr)]
    if depth > _MAX_NAMES_DEEP:
        return spelled
    # How a loader was built says nothing about what its length is divided by.
    held = {text(a) for node in ast.walk(expr) if is_call(node, "len") for a in node.args}
    # Nor does how the owner of a setting was built: `accelerator.num_processes`.
    held |= {text(node.value) for node in ast.walk(expr) if isinstance(node, ast.Attribute)}
    for node in ast.walk(expr):
        if isinstance(node, (ast.Name, ast.Attribute)) and text(node) not in held:
            for definition in env.get(text(node), ()):
                if text(definition.expr) != text(node):
                    spelled += _spellings(definition.expr, definition.env, depth + 1)
    return spelled
