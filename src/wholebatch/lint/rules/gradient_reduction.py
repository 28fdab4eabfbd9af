"""The reduction of gradients over ranks: once per window."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..normalise.syntax import last_part, text
from ..windows import File, Window
from .rule_base import NOTE, Report, rule

_WRAPS = re.compile(r"DistributedDataParallel|(Native|Apex|Torch)?DDP|(smart|wrap\w*)_(DDP|ddp)")
_BY_HAND = {"tensor", "native", "wrapper", "lightning"}


@rule("WB111", "DDP synchronises every micro-batch", NOTE)
def reduced_every_micro_batch(file: File) -> Iterator[Report]:
    """Gradients are reduced over the network for every micro-batch.

    DistributedDataParallel sends all gradients in every backward: K times the traffic for the same
    update. Run all but the last micro-batch of a window, forward and backward, under `no_sync()`.
    """
    for window in file.shaped("boundary", "nested"):
        by_hand = {e.detail for e in window.backwards} <= _BY_HAND
        if by_hand and window.backwards and not window.of("hold_sync") and _wraps(window):
            yield Report(
                window.backwards[0].node,
                "DistributedDataParallel reduces the gradients on every micro-batch: the update "
                "is the same, but slower; hold it with `no_sync()` for all but the last of a "
                "window",
                NOTE,
            )


def _wraps(window: Window) -> bool:
    """True if a trained model is wrapped."""
    for event in window.file.around(window.events[0].root):
        call = event.node
        if event.kind == "call" and isinstance(call, ast.Call):
            wraps = _WRAPS.fullmatch(last_part(call.func))
            if wraps and not (call.args and "teacher" in text(call.args[0]).lower()):
                return True
    return False
