"""Which ways of training a model of so many parameters fit its GPUs, by arithmetic alone.

The bytes of a parameter are those of its number, its gradient and its optimizer state. Activations
come on top; they depend on the model and the micro-batch, and `plan` predicts them for a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from wholebatch.errors import OptionError

SHARE = 0.75
"""The share of a GPU that state may fill; the rest is for activations and the allocator."""


@dataclass(frozen=True)
class Way:
    """A way to train: bytes of a parameter on every GPU, shared by all, and in host memory."""

    name: str
    each: float
    shared: float = 0.0
    host: float = 0.0


WAYS = (
    Way("DDP, fp32 and Adam", 16),
    Way("DDP, 8-bit Adam", 10),
    Way("ZeRO-1, 16 bit", 4, 12),
    Way("ZeRO-2, 16 bit", 2, 14),
    Way("FSDP2 or ZeRO-3", 0, 16),
    Way("FSDP2, 8-bit Adam", 0, 10),
    Way("ZeRO-3, Adam on the host", 0, 4, 12),
    Way("LoRA, 16-bit weights", 2.2),
    Way("LoRA, weights sharded", 0, 2.2),
    Way("QLoRA, 4-bit weights", 0.75),
    Way("QLoRA, weights sharded", 0, 0.75),
)
"""Adam in fp32: 4 + 4 + 8 bytes. ZeRO in 16 bit: 2 + 2, and 12 for a copy in fp32 and the moments.
8-bit Adam: 4 + 4 + 2. LoRA: about 1% of the parameters are trained, in fp32. QLoRA: half a byte,
its scales, and the same adapters."""


@dataclass(frozen=True)
class Fit:
    """What a way takes on each GPU and in host memory, in bytes."""

    way: str
    each: int
    host: int
    fits: bool
    gpus: int | None
    """The fewest GPUs of this size; None if one GPU must hold it and does not."""


def parameters_of(text: str, label: str) -> int:
    """Return a number of parameters such as 70B, 350M or 1.5e9.

    >>> parameters_of("70B", "--parameters"), parameters_of("350M", "--parameters")
    (70000000000, 350000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgbt]?)", text.strip().lower())
    number = float(match[1]) if match else 0.0
    number *= {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}.get(match[2] if match else "", 1)
    if not 1 <= number < 1e16:
        raise OptionError(f"{label} {text}: must be a number of parameters such as 70B or 350M")
    return int(number)


def fits(parameters: int, *, gpus: int, memory: int) -> Iterator[Fit]:
    """Yield each way to keep the state of a model, from the plainest on.

    >>> [fit.way for fit in fits(7 * 10**9, gpus=1, memory=24 * 2**30) if fit.fits]
    ['LoRA, 16-bit weights', 'LoRA, weights sharded', 'QLoRA, 4-bit weights', \
'QLoRA, weights sharded']
    """
    room = SHARE * memory
    for way in WAYS:
        each = parameters * (way.each + way.shared / gpus)
        left = room - parameters * way.each
        fewest = math.ceil(parameters * way.shared / left) if left > 0 else None
        fewest = None if fewest is None else max(1, fewest)
        host = int(parameters * way.host)
        yield Fit(way.name, int(each), host, each <= room, fewest)
