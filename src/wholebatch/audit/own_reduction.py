"""A loss of torch whose own reduction is another than the loop says."""

from __future__ import annotations

from collections.abc import Iterable

from wholebatch.audit.check import Check, LossOfMicroBatch
from wholebatch.errors import LossError


class OwnReduction(Check):
    """Refuse a `total` that is the plain mean of a loss of torch, and a `mean` that is its sum.

    The graph shows the reduction, and no factor changes it.
    """

    def loss_is_known(self, micro: LossOfMicroBatch) -> Iterable[str]:
        parts, units = micro.parts, micro.number
        wrong = "sum" if micro.is_mean else "mean"
        are_plain = all(
            part.function and part.kind == wrong and not part.factors and part.over > 1
            for part in parts
        )
        # As many as units: a loop over the samples adds the mean of each.
        if units <= 1 or not parts or not are_plain or len(parts) >= units:
            return ()
        function, number = parts[0].function, f"{units:g}"
        if micro.is_mean:
            raise LossError(
                f"mean is the sum of {function}, and must be the mean over its units={number}: its "
                f"gradient would be too large. Pass it as a sum, backward(total, units={number})"
            )
        raise LossError(
            f"total is the mean of {function}, and must be the sum over its units={number}: its "
            'gradient would be too small. Take the sum (reduction="sum"), or say that it is a '
            f"mean: backward(mean=..., units={parts[0].over:g})"
        )
