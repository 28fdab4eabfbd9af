"""The learning-rate range test: raise the rate with every update until the loss diverges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from wholebatch.errors import NonFiniteError, OptionError
from wholebatch.tune.task import Task


@dataclass(frozen=True)
class RangeTest:
    """The smoothed loss by learning rate (Smith 2017, arXiv:1506.01186).

    `steepest` is the rate at which the loss falls fastest, `lowest` the one at which it is lowest.
    `diverges` is the rate at which it was twice the lowest, or None if it never was.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    steepest: float
    lowest: float
    diverges: float | None

    def advice(self) -> list[str]:
        """Return which rates to try, in sentences."""
        least, most = sorted((self.steepest, self.lowest / 3))
        lines = [
            f"try a learning rate of {least:.2g} to {most:.2g}: the loss falls fastest at "
            f"{self.steepest:.3g} and is lowest at {self.lowest:.3g}"
        ]
        if self.diverges is None:
            return [*lines, f"the loss did not diverge up to {self.rates[-1]:.3g}"]
        return [*lines, f"the loss had doubled at {self.diverges:.3g}"]


def range_test(
    task: Task,
    *,
    low: float,
    high: float,
    updates: int = 100,
    watch: Callable[[int, float], None] = lambda update, rate: None,
) -> RangeTest:
    """Train a new model with rates that rise from `low` to `high`; stop when the loss has doubled.

    The rate grows by the same factor with every update. Parameter groups keep their ratios.
    """
    if not 0 < low < high or updates < 10:
        raise OptionError(
            f"low={low:g}, high={high:g}, updates={updates}: must be 0 < low < high, with at least "
            "10 updates"
        )
    model, optimizer = task.build()
    own = [float(group["lr"]) for group in optimizer.param_groups]
    train = task.train(model, optimizer)
    rates: list[float] = []
    losses: list[float] = []
    average, diverges = 0.0, None
    for update in range(updates):
        rate = low * (high / low) ** (update / (updates - 1))
        watch(update, rate)
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate * lr / own[0]
        try:
            loss = train.step(task.batches()).loss
        except NonFiniteError:
            if not update:  # the lowest rate did not cause it
                raise
            loss = math.inf
        average = 0.8 * average + 0.2 * loss
        smooth = average / (1 - 0.8 ** (update + 1))
        if losses and not smooth < 2 * min(losses):
            diverges = rate
            break
        rates.append(rate)
        losses.append(smooth)
    # The slope over a tenth of the test; the first tenth is left out, it is not smooth yet.
    over = max(1, len(losses) // 10)
    slopes = [b - a for a, b in zip(losses[over:], losses[2 * over :], strict=False)]
    steepest = rates[over + slopes.index(min(slopes)) + over // 2] if slopes else rates[0]
    lowest = rates[losses.index(min(losses))]
    return RangeTest(tuple(rates), tuple(losses), steepest, lowest, diverges)
