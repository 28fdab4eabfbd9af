"""The learning-rate schedule steps on every micro-batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import Event, File
from ..model.expressions import text
from .rule_base import Report, moved, rule

# A schedule that is as long as there are micro-batches: `num_training_steps=updates * accum`.
_COUNTS_MICRO_BATCHES = re.compile(r"(steps|total)\w* \* [\w.]*(accum|gas\b)", re.I)


@rule(
    "WB107",
    "scheduler stepped every micro-batch",
    "The learning-rate schedule steps for every micro-batch instead of every update.",
    fixable=True,
)
def check(file: File) -> Iterator[Report]:
    """Yield every schedule step that is not at the boundary."""
    for window in file.shaped("boundary", "nested", "accelerate"):
        for event in window.of("sched"):
            call = event.node
            has_argument = isinstance(call, ast.Call) and bool(call.args or call.keywords)
            if window.when(event) != "always" or has_argument:
                continue
            if window.shape == "accelerate" and _prepared(event, file):
                continue
            made = window.makers(text(event.receiver), event.env) if event.receiver else []
            if any(_COUNTS_MICRO_BATCHES.search(text(call)) for call, _ in made):
                continue
            yield Report(
                event.node,
                f"`{text(event.node)}` runs on every micro-batch: the schedule goes "
                f"`{window.count_name}` times too fast; step it once per update",
                moved(event, window, "after"),
                unsafe=True,  # The schedule's length may be wrong too.
            )


def _prepared(event: Event, file: File) -> bool:
    """True if Accelerate wraps the schedule and so skips inside a window, or if this is unknown."""
    calls = file.facts.made("prepare")
    if not calls or event.receiver is None or isinstance(event.receiver, ast.Subscript):
        return True
    name = text(event.receiver).rpartition(".")[2]
    for call in calls:
        if any(isinstance(a, ast.Starred) for a in call.args):
            return True
        if re.search(rf"\b{re.escape(name)}\b", text(call)):
            return True
    return not any(len(call.args) > 1 for call in calls)
