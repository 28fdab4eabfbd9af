"""A schedule is as long as the micro-batches, but steps once per update.

With `len(loader) * epochs` as its length, the schedule ends K times too late: training stops at
1/K of it. Divide its length by the number of micro-batches per update.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.events import Env
from ..model.expressions import is_accumulation_name, is_call, keyword, last_part, positional, text
from .rule_base import Report, is_prepared, rule

_LENGTH_OPTIONS = (
    "num_training_steps", "t_total", "total_steps", "T_max", "total_iters", "num_steps",
    "steps_per_epoch",
)  # fmt: skip
# The position of the length: (optimizer, warm-up, length) is the usual signature.
_LENGTH_POSITIONS = {"CosineAnnealingLR": 1, "OneCycleLR": 2}
LOADER_LENGTH = re.compile(
    r"\blen\([\w.\[\]'\"]*(loader|dl|ld|batches|iterator|dataset)\w*(\(\))?\)(?! *//)", re.I
)
# Updates times their micro-batches: `max_train_steps * args.accum`.
STEPS_TIMES_COUNT = re.compile(r"(steps|total)\w* \* [\w.]*(accum|gas\b)", re.I)
_MAX_NAMES_DEEP = 4


@rule("micro-batches counted as updates")
def check(file: File) -> Iterator[Report]:
    """Yield the schedules of each window that count micro-batches."""
    for window in file.shaped("boundary", "accelerate"):
        for event in window.of("sched"):
            prepared = window.shape == "accelerate" and is_prepared(event, file.facts)
            if not prepared and window.when(event) != "boundary":
                continue
            for call, env in window.makers(text(event.receiver), event.env):
                length = _length(call)
                if length is not None and _counts_micro_batches(length, env, window):
                    yield Report(
                        call,
                        "schedule is as long as the micro-batches but steps once every "
                        f"{window.count_name}: divide its length by it",
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
    spelled = spellings(length, env)
    if any(map(STEPS_TIMES_COUNT.search, spelled)):
        return True
    if any(is_accumulation_name(s) or _divides_by(window.every_name, s) for s in spelled):
        return False
    return any(map(LOADER_LENGTH.search, spelled))


def _divides_by(count: str, spelled: str) -> bool:
    return bool(count) and f"/ {count}" in spelled


def spellings(expr: ast.expr, env: Env, depth: int = 0) -> list[str]:
    """Return the text of an expression, and of everything that its names are computed from."""
    found = [text(expr)]
    if depth > _MAX_NAMES_DEEP:
        return found
    # How a loader was built says nothing about what its length is divided by.
    held = {text(a) for node in ast.walk(expr) if is_call(node, "len") for a in node.args}
    # Nor does how the owner of a setting was built: `accelerator.num_processes`.
    held |= {text(node.value) for node in ast.walk(expr) if isinstance(node, ast.Attribute)}
    for node in ast.walk(expr):
        if isinstance(node, (ast.Name, ast.Attribute)) and text(node) not in held:
            for definition in env.get(text(node), ()):
                if text(definition.expr) != text(node):
                    found += spellings(definition.expr, definition.env, depth + 1)
    return found
