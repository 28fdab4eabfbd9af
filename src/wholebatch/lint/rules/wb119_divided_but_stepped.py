"""The loss is divided by the accumulation steps, but every micro-batch makes an update.

The gradient is K times too small, and nothing is accumulated. Step once every K micro-batches, or
do not divide.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.expressions import is_accumulation_name, text
from .rule_base import Report, rule


@rule("divided but stepped")
def check(file: File) -> Iterator[Report]:
    """Yield at most one report per loop that updates on every batch."""
    for window in file.shaped("plain"):
        steps = window.of("step")
        if window.loop.virtual or not steps or any(_may_wait(s, window) for s in steps):
            continue
        yield from _by_hand(window)
        yield from _by_accelerate(window, file)


def _may_wait(step: Event, window: LoopWindow) -> bool:
    """True if anything on the way to a step may be a boundary that is not understood."""
    return window.when(step) != "always" or any(
        guard.origin in {"skip", "break"} or is_accumulation_name(text(guard.expr))
        for guard in step.guards(window.loop)
    )


def _by_hand(window: LoopWindow) -> Iterator[Report]:
    for _, chain in window.chains:
        counts = [d for d in chain.divisors if window.counts(d)]
        off = window.facts.accelerator_divides is False  # By its own number, which is 1.
        counts = [d for d in counts if not (off and "accelerator." in d.key)]
        # The parts of one loss, added up by a loop inside.
        counts = [d for d in counts if not _in_inner_loop(d.node, window)]
        if counts and not chain.factors:
            name = counts[0].written
            yield Report(
                counts[0].node,
                f"loss is divided by `{name}`, but the optimizer steps on every micro-batch: the "
                f"gradient is `{name}` times too small; step once every `{name}` micro-batches",
            )
            return


def _in_inner_loop(node: ast.AST, window: LoopWindow) -> bool:
    line = getattr(node, "lineno", 0)
    inner = [n for n in ast.walk(window.loop.node) if isinstance(n, (ast.For, ast.While))]
    return any(
        n is not window.loop.node and n.lineno < line <= (n.end_lineno or line) for n in inner
    )


def _by_accelerate(window: LoopWindow, file: File) -> Iterator[Report]:
    """Yield a backward that Accelerate divides, in a loop that it does not accumulate."""
    details = {e.detail for e in window.backwards}
    if any(e.loops[-1] is not window.loop for e in window.backwards):
        return  # Several backwards make one update.
    if "accumulate" in file.facts.called:
        return  # Somewhere else, perhaps in a context manager of the file's own.
    if details == {"accelerate"} and file.facts.accelerator_divides:
        yield Report(
            window.backwards[0].node,
            "Accelerate divides this loss by its `gradient_accumulation_steps`, but without "
            "`accelerator.accumulate(model)` every micro-batch makes an update: wrap the body of "
            "the loop in it",
        )
