"""`zero_grad` runs for every micro-batch, so only the last one of a window counts.

The gradients of the other micro-batches are computed and thrown away: the update is that of a
batch K times smaller, at K times the cost. Clear once per window, after the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from .rule_base import Report, closing_steps, is_optimizer_of, rule


@rule("gradients cleared every micro-batch")
def check(file: File) -> Iterator[Report]:
    """Yield every clearing call that is not at the boundary."""
    for window in file.shaped("boundary", "nested"):
        steps = closing_steps(window)
        for zero in window.of("zero"):
            if is_optimizer_of(zero, steps) and _every_micro_batch(zero, window, steps):
                yield Report(
                    zero.node,
                    "gradients are cleared on every micro-batch but used every "
                    f"{window.count_name}: only the last micro-batch counts; clear once, "
                    "after the step",
                )


def _every_micro_batch(zero: Event, window: LoopWindow, steps: list[Event]) -> bool:
    """True if it runs on every micro-batch: unconditionally, or under conditions of its step."""
    if window.when(zero) != "sometimes":
        return window.when(zero) == "always"
    mine = zero.conditions(window.loop)
    own = [s for s in steps if s.receiver_text == zero.receiver_text]
    return any(mine <= step.conditions(window.loop) for step in own)
