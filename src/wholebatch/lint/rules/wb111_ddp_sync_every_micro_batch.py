"""Gradients are reduced over the network for every micro-batch.

DistributedDataParallel sends all gradients in every backward: K times the traffic for the same
update. Run all but the last micro-batch of a window, forward and backward, under `no_sync()`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..model import File
from ..model.expressions import is_accumulation_name, is_not, last_part, text
from .rule_base import Report, rule

_HELD = re.compile(
    r"no_sync|require_backward_grad_sync|no_backward_sync|disable_allreduce|set_requires_gradient_sync|ddp_sync"
)
_WRAPS = re.compile(r"DistributedDataParallel|(Native|Apex|Torch)?DDP|(smart|wrap\w*)_(DDP|ddp)")
_BY_HAND = {"tensor", "native", "wrapper", "lightning"}


@rule("DDP synchronises every micro-batch")
def check(file: File) -> Iterator[Report]:
    """Yield windows under DDP that never hold the reduction."""
    windows = file.shaped("boundary", "nested")
    if not windows or file.facts.mentions(_HELD) or not _wraps(file):
        return
    for window in windows:
        by_hand = {e.detail for e in window.backwards} <= _BY_HAND
        if window.backwards and by_hand:
            yield Report(
                window.backwards[0].node,
                "DistributedDataParallel reduces the gradients on every micro-batch: hold it "
                "with `no_sync()` for all but the last of a window",
            )


def _wraps(file: File) -> bool:
    """True if a trained model is wrapped, except where nothing is accumulated."""
    wraps = [c for c in file.facts.calls if _WRAPS.fullmatch(last_part(c.func))]
    trained = [c for c in wraps if not (c.args and "teacher" in text(c.args[0]).lower())]
    otherwise = {
        id(call)
        for node in (file.facts.nodes if trained else ())
        if isinstance(node, ast.If)
        and is_not(node.test)
        and is_accumulation_name(text(node.test.operand))
        for stmt in node.body
        for call in ast.walk(stmt)
    }
    return any(id(call) not in otherwise for call in trained)
