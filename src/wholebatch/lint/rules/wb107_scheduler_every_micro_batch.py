"""The learning-rate schedule steps for every micro-batch instead of every update.

The schedule goes K times too fast: warm-up and decay end after 1/K of the training. Step it where
the optimizer steps.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.events import Env
from ..model.expressions import has_word, is_accumulation_name, is_call, last_part, text
from ..model.window_boundary import iterated
from .rule_base import Report, is_prepared, rule
from .wb116_micro_batches_counted import LOADER_LENGTH, STEPS_TIMES_COUNT, spellings


@rule("scheduler stepped every micro-batch")
def check(file: File) -> Iterator[Report]:
    """Yield every schedule step that is not at the boundary."""
    for window in file.shaped("boundary", "nested", "accelerate"):
        for event in window.of("sched"):
            call = event.node
            has_argument = isinstance(call, ast.Call) and bool(call.args or call.keywords)
            if window.when(event) != "always" or has_argument:
                continue
            if window.shape == "accelerate" and is_prepared(event, file.facts) is not False:
                continue
            made = window.makers(text(event.receiver), event.env)
            if any(_counts_micro_batches(call, env, window) for call, env in made):
                continue
            yield Report(
                event.node,
                f"`{text(event.node)}` runs on every micro-batch: the schedule goes "
                f"{window.count_name} times too fast; step it once per update",
            )


def _counts_micro_batches(call: ast.Call, env: Env, window: LoopWindow) -> bool:
    """True if a schedule is, or may be, as long as the micro-batches: then each may step it."""
    over = iterated(window.loop)
    limit = text(over.args[-1]) if is_call(over, "range") and over.args else ""
    spelled = spellings(call, env)
    if last_part(call.func) == "LambdaLR":
        return True  # A function of the step may count whatever it likes.
    if limit[:1].isalpha() and any(has_word(limit, s) for s in spelled):
        return True
    if any(map(STEPS_TIMES_COUNT.search, spelled)):
        return True
    if any(map(is_accumulation_name, spelled)):
        return False
    return any(LOADER_LENGTH.search(s) or "steps_per_epoch" in s for s in spelled)
