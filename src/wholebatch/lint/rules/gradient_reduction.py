"""The reduction of gradients over ranks: once per window."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..normalise import Event
from ..normalise.syntax import last_part, text
from ..windows import File
from .rule_base import NOTE, Report, rule

_WRAPS = re.compile(r"DistributedDataParallel|(Native|Apex|Torch)?DDP|(smart|wrap\w*)_(DDP|ddp)")
_BY_HAND = {"tensor", "native", "wrapper", "lightning"}


@rule("WB111", "DDP synchronises every micro-batch", NOTE)
def reduced_every_micro_batch(file: File) -> Iterator[Report]:
    """Gradients are reduced over the network for every micro-batch.

    DistributedDataParallel sends all gradients in every backward: K times the traffic for the same
    update. Run all but the last micro-batch of a window, forward and backward, under `no_sync()`.
    """
    wraps: dict[int, bool] = {}
    for window in file.shaped("boundary", "nested"):
        root = window.events[0].root
        if root not in wraps:
            wraps[root] = any(map(_wraps, file.normal.around(root)))
        by_hand = {e.detail for e in window.backwards} <= _BY_HAND
        if by_hand and window.backwards and not window.of("hold_sync") and wraps[root]:
            yield Report(
                window.backwards[0].node,
                "DistributedDataParallel reduces the gradients on every micro-batch: the update "
                "is the same, but slower; hold it with `no_sync()` for all but the last of a "
                "window",
                NOTE,
            )


def _wraps(event: Event) -> bool:
    """True if a trained model is wrapped."""
    call = event.node
    if event.kind != "call" or not isinstance(call, ast.Call):
        return False
    is_teacher = bool(call.args) and "teacher" in text(call.args[0]).lower()
    return _WRAPS.fullmatch(last_part(call.func)) is not None and not is_teacher
