"""The reduction of gradients over ranks: once per window."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File
from ..model.expressions import is_accumulation_name, is_not, text
from ..model.surroundings import Surroundings
from .rule_base import SPEED, Report, rule

_WRAPS = re.compile(r"DistributedDataParallel|(Native|Apex|Torch)?DDP|(smart|wrap\w*)_(DDP|ddp)")
_BY_HAND = {"tensor", "native", "wrapper", "lightning"}


@rule("WB111", "DDP synchronises every micro-batch", SPEED)
def reduced_every_micro_batch(file: File) -> Iterator[Report]:
    """Gradients are reduced over the network for every micro-batch.

    DistributedDataParallel sends all gradients in every backward: K times the traffic for the same
    update. Run all but the last micro-batch of a window, forward and backward, under `no_sync()`.
    """
    for window in file.shaped("boundary", "nested"):
        by_hand = {e.detail for e in window.backwards} <= _BY_HAND
        if (
            window.backwards
            and by_hand
            and not window.of("hold_sync")
            and window.around.ask(_wraps)
        ):
            yield Report(
                window.backwards[0].node,
                "DistributedDataParallel reduces the gradients on every micro-batch: hold it "
                "with `no_sync()` for all but the last of a window",
            )


def _wraps(around: Surroundings) -> bool:
    """True if a trained model is wrapped, except where nothing is accumulated."""
    wraps = [c for name, calls in around.calls.items() if _WRAPS.fullmatch(name) for c in calls]
    trained = [c for c in wraps if not (c.args and "teacher" in text(c.args[0]).lower())]
    otherwise = {
        id(call)
        for node in (around.nodes if trained else ())
        if isinstance(node, ast.If)
        and is_not(node.test)
        and is_accumulation_name(text(node.test.operand))
        for stmt in node.body
        for call in ast.walk(stmt)
    }
    return any(id(call) not in otherwise for call in trained)
