"""A loss that a GradScaler has scaled already."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wholebatch.checks.check import Answer, Check, MicroBatch
from wholebatch.coupled.causes import AuditFinding
from wholebatch.coupled.last_reduction import Reduction

_LOSS = "the loss"


class ScaledLoss(Check):
    """A loss that a GradScaler has scaled.

    Finds: a loss that was multiplied last by a power of two of at least 256 that is not its units.

    Costs: nothing beside the walk of `SumOrMean`, in the first window.

    Certain: no other code is known to multiply a loss by such a number at its very end.

    Cannot see: a scale below 256, or one that is no power of two.
    """

    def micro_batch(self, micro: MicroBatch) -> Answer:
        return loss_scale(micro.reductions, micro.number)


def loss_scale(reductions: Sequence[Reduction], units: float) -> AuditFinding | None:
    """Find a loss that a GradScaler has scaled: its factor is a large power of two."""
    for term in reductions:
        factor = term.scales[0].by if term.scales else 0.0
        is_scale = math.isfinite(factor) and factor >= 256 and math.frexp(factor)[0] == 0.5
        if is_scale and term.scales[0].operation == "multiplied" and factor != units:
            text = (
                f"the loss is multiplied by {factor:g}, as GradScaler.scale(loss) does: give the "
                "loss itself, and the scaler as close=wb.Close(scaler=scaler), which scales, "
                "unscales and updates it"
            )
            return AuditFinding(_LOSS, "loss scale", "divided", text)
    return None
