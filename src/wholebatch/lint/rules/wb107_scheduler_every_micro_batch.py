"""The learning-rate schedule steps for every micro-batch instead of every update."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.expressions import is_accumulation_name, is_call, text, walk
from ..model.window_boundary import iterated
from .rule_base import Report, moved, prepared, rule

# A schedule that is as long as there are micro-batches: `num_training_steps=updates * accum`.
_COUNTS_MICRO_BATCHES = re.compile(
    r"(steps|total)\w* \* [\w.]*(accum|gas\b)"
    r"|(steps_per_epoch|len\([\w.]*(loader|dl|batches)\w*\))(?! *//?)",
    re.I,
)
# A number of batches that is not divided by the number of micro-batches per update.
_BATCHES = re.compile(r"// *\(?[\w.]*batch_?size", re.I)
_READ = re.compile(r"\.(\w*steps)\b")
_MAX_NAMES = 20


@rule("scheduler stepped every micro-batch", fixable=True)
def check(file: File) -> Iterator[Report]:
    """Yield every schedule step that is not at the boundary."""
    for window in file.shaped("boundary", "nested", "accelerate"):
        counts_samples = window.boundary is not None and window.boundary.kind == "dynamic"
        for event in window.of("sched") if not counts_samples else ():
            call = event.node
            has_argument = isinstance(call, ast.Call) and bool(call.args or call.keywords)
            if window.when(event) != "always" or has_argument:
                continue
            if window.shape == "accelerate" and prepared(event, file.facts) is not False:
                continue
            made = window.makers(text(event.receiver), event.env) if event.receiver else []
            if any(_counts_micro_batches(call, window) for call, _ in made):
                continue
            yield Report(
                event.node,
                f"`{text(event.node)}` runs on every micro-batch: the schedule goes "
                f"`{window.count_name}` times too fast; step it once per update",
                moved(event, window, "after"),
                unsafe=True,  # The schedule's length may be wrong too.
            )


def _counts_micro_batches(call: ast.Call, window: LoopWindow) -> bool:
    """True if a schedule is as long as the micro-batches, so that each may step it."""
    facts, over = window.facts, iterated(window.loop)
    limit = text(over.args[-1]) if is_call(over, "range") and over.args else ""
    functions = {f.name: f for f in facts.every_function}
    todo: list[ast.AST] = [call]
    for _ in range(_MAX_NAMES):
        if not todo:
            break
        node = todo.pop(0)
        spelled = text(node)
        if _COUNTS_MICRO_BATCHES.search(spelled) or (limit[:1].isalpha() and limit in spelled):
            return True
        parts = facts.imported_parts(node, 0) if isinstance(node, ast.Call) else []
        if any(_BATCHES.search(s) and not is_accumulation_name(s) for s in (spelled, *parts)):
            return True
        if parts:  # Settings that a function of another module reads.
            read = {n for part in parts for n in _READ.findall(part)}
            set_here = [n for n in facts.assigned if "." in n and n.rpartition(".")[2] in read]
            todo += [value for n in set_here for value in facts.assigned[n]]
        names = {n.id for n in walk(node) if isinstance(n, ast.Name)} - {getattr(node, "name", "")}
        for name in sorted(names):
            todo += [functions[name]] if name in functions else facts.assigned.get(name, [])
    return False
