"""The backward runs only at the boundary, so all micro-batches but the last are lost.

Their losses are computed and thrown away: the update is that of one micro-batch. Run the backward
for every micro-batch, and only the step at the boundary.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..model import Event, File, LoopWindow
from ..model.expressions import text
from .rule_base import Report, rule


@rule("backward only at the boundary")
def check(file: File) -> Iterator[Report]:
    """Yield the backward of each window that has one only at its boundary."""
    for window in file.shaped("last_only"):
        if not any(_is_sum(event, window) for event in window.backwards):
            yield Report(
                window.backwards[0].node,
                f"the backward runs once every {window.count_name} micro-batches, and the losses "
                "of the others are lost: run it for every micro-batch, and the step at the "
                "boundary",
            )


def _is_sum(event: Event, window: LoopWindow) -> bool:
    """True if the loss of the backward is a sum over micro-batches: `total = total + loss`."""
    names = {text(n) for n in ast.walk(event.argument or ast.Pass()) if isinstance(n, ast.Name)}
    sums = [e for e in window.of("augment") if window.when(e) != "boundary"]
    carried = [c for c in window.ways(event) if c.base_call is None]
    return bool(carried) or any(text(e.receiver) in names for e in sums)
