"""Gradients are clipped for every micro-batch instead of once per update.

Clipping the sum so far shrinks the early micro-batches again and again: the update has another
direction than that of the batch. Clip once per window, just before the step.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import File
from ..model.events import Context, only_measures
from ..model.expressions import calls_in, has_word, is_call, last_part, text
from .rule_base import Report, rule


@rule("clipped every micro-batch")
def check(file: File) -> Iterator[Report]:
    """Yield every clipping call that is not at the boundary."""
    yield from _in_windows_of_wholebatch(file)
    for window in file.accumulating:
        clips = window.of("clip")
        # Not those on a branch without a backward of this window.
        clips = [c for c in clips if not all(c.excludes(b) for b in window.backwards)]
        for clip in clips:
            # Clipped on both sides of a condition, it is clipped on every micro-batch.
            either = [c for c in clips if window.when(c) == "sometimes" and c.excludes(clip)]
            if window.when(clip) != "always" and not (window.when(clip) == "sometimes" and either):
                continue
            contexts = [c.made for c in clip.path if isinstance(c, Context)]
            if window.shape == "accelerate" and not any("accumulate(" in c for c in contexts):
                continue
            yield Report(
                clip.node,
                "gradients are clipped on every micro-batch: clip once, at the end of the window, "
                "before the optimizer steps",
            )


def _in_windows_of_wholebatch(file: File) -> Iterator[Report]:
    """Yield the clipping calls in a loop over `acc.over(loader)`, of a model that `acc` updates."""
    for loop in file.facts.nodes:
        if not isinstance(loop, ast.For) or not is_call(loop.iter, "over"):
            continue
        owner = loop.iter.func.value if isinstance(loop.iter.func, ast.Attribute) else None
        models = [
            text(made.args[0])
            for made in file.facts.assigned.get(text(owner), ())
            if is_call(made, "Accumulator") and len(made.args) > 1 and text(made.args[1]) != "None"
        ]
        for call in calls_in(loop):
            is_clip = last_part(call.func) in ("clip_grad_norm_", "clip_grad_value_")
            if not is_clip or not call.args or only_measures(call):
                continue
            if any(has_word(model, text(call.args[0])) for model in models):
                yield Report(
                    call,
                    "the last backward of a window makes the update and clears the gradients, so "
                    "there is none to clip after it: give wb.Accumulator clip_norm=, or "
                    "close=wb.Close(clip_value=...)",
                )
