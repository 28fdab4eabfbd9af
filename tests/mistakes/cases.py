"""The list of correct cases, and the interfaces that each fits."""

from __future__ import annotations

import random
from collections.abc import Callable

from torch import nn

from tests.mistakes.task import Task

STREAMS = ("Accumulator", "Accelerate", "Fabric", "Lightning")
ALL = ("WholeBatch", *STREAMS, "Trainer")
Make = Callable[[random.Random, int], Task]
CASES: dict[str, tuple[Make, tuple[str, ...]]] = {}


def correct(*interfaces: str) -> Callable[[Make], Make]:
    def keep(make: Make) -> Make:
        CASES[make.__name__.replace("_", " ")] = (make, interfaces)
        return make

    return keep


def net(width: int = 5, out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, out)).double()
