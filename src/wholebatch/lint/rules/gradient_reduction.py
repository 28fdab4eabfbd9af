"""The reduction of gradients over ranks: once per window."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..model import File
from ..model.expressions import text
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
    """True if a trained model is wrapped."""
    wraps = [c for name, calls in around.calls.items() if _WRAPS.fullmatch(name) for c in calls]
    return any(not (c.args and "teacher" in text(c.args[0]).lower()) for c in wraps)
