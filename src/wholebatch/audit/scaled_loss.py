"""A loss that a GradScaler may have scaled already."""

from __future__ import annotations

import math

from wholebatch.audit.check import Answer, Check, MicroBatch, Warned, silenced


class ScaledLoss(Check):
    """A loss that a GradScaler has scaled.

    Finds: a loss that was multiplied last by a power of two of at least 256 that is not its units.

    Costs: the walk of `SumOrMean`.

    Likely: the factor may be a weight.

    Cannot see: a scale below 256, or one that is no power of two.
    """

    def micro_batch(self, micro: MicroBatch) -> Answer:
        for term in micro.reductions:
            factor = term.scales[0].by if term.scales else 0.0
            is_scale = math.isfinite(factor) and factor >= 256 and math.frexp(factor)[0] == 0.5
            is_product = is_scale and term.scales[0].operation == "multiplied"
            if is_product and factor != micro.number:
                begin = f"the loss is multiplied by {factor:g}"
                return Warned(
                    f"{begin}, a power of two: if GradScaler.scale(loss) does so, give the loss "
                    "itself, and the scaler as close=wb.Close(scaler=scaler), which scales, "
                    "unscales and updates it. If it is a weight, nothing is wrong; "
                    f"{silenced(begin)}"
                )
        return None
