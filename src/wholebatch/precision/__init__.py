"""The number formats of a micro-batch's computation and of its gradient sums.

`Precision` decides how the forward runs (plain, or under autocast with the weights cast once per
window), `LossScale` keeps fp16 gradients in range, and `SixteenBit` adds the gradients of 16-bit
parameters in fp32.
"""

from wholebatch.precision.accumulate import SIXTEEN_BIT, SixteenBit
from wholebatch.precision.autocast import Autocast, Full, Precision, choose
from wholebatch.precision.scale import LossScale

__all__ = [
    "SIXTEEN_BIT",
    "Autocast",
    "Full",
    "LossScale",
    "Precision",
    "SixteenBit",
    "choose",
]
