"""Gradients are never cleared, so every update adds up all batches since the start.

Call `optimizer.zero_grad()` after every step.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..model import File, LoopWindow
from ..model.expressions import text, values_of
from .rule_base import Report, closing_steps, rule

_CLEARS = ("zero_grad", "grad = None", "grad=None", "grad.zero_", "grad.data.zero_", "zero_()")


@rule("gradients never cleared")
def check(file: File) -> Iterator[Report]:
    """Yield the step of each loop in a file that clears no gradient."""
    if any(word in file.facts.source for word in _CLEARS):
        return
    for window in file.shaped("plain", "boundary", "nested"):
        steps = closing_steps(window)
        if steps and _is_of_torch(window):
            yield Report(
                steps[0].node,
                "no gradient is cleared in this file: every update adds up all batches since the "
                "start; call `zero_grad()` after the step",
            )
            return


def _is_of_torch(window: LoopWindow) -> bool:
    """True if the optimizer is made here by torch, and only steps: a wrapper may clear itself."""
    for step in closing_steps(window):
        made = [text(call.func) for call, _ in window.makers(step.receiver_text, step.env)]
        handed = [text(a) for e in window.of("call") for a in values_of(e.node)]  # type: ignore[arg-type]
        if step.receiver_text in handed or not any("optim." in name for name in made):
            return False
    return True
