"""The number formats of a micro-batch's computation and of its gradient sums.

`Precision` decides how the forward runs (plain, or under autocast with the weights cast once per
window), `LossScale` keeps fp16 gradients in range, and `SixteenBit` adds the gradients of 16-bit
parameters in fp32.
"""

from wholebatch.core.precision.autocast import Autocast, Full, Precision, choose
from wholebatch.core.precision.fp32_accumulation import SIXTEEN_BIT, SixteenBit, round_gradient
from wholebatch.core.precision.loss_scale import LossScale

__all__ = [
    "SIXTEEN_BIT",
    "Autocast",
    "Full",
    "LossScale",
    "Precision",
    "SixteenBit",
    "choose",
    "round_gradient",
]
