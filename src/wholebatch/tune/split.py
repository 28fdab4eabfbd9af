"""A window's time by part, from moments that were marked on the way through it."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from wholebatch.tune.clock import Clock
from wholebatch.tune.settings import PARTS

__all__ = ["Stamps", "additions", "split_of"]


class Stamps:
    """The moments of one window: data, start, (forward, backward, done) × steps, end."""

    def __init__(self, clock: Clock, *, tells_apart: bool) -> None:
        self.clock = clock
        self.tells_apart = tells_apart
        self.marks: list[tuple[str, Any]] = []

    def mark(self, what: str) -> None:
        """`what` begins now."""
        self.marks.append((what, self.clock.now()))

    def after_micro(self, done: int, of: int) -> None:
        """A micro-batch is done."""
        self.mark("done")


def split_of(stamps: Stamps, *, ranks: int = 1) -> dict[str, float]:
    """Seconds by part of one window.

    Before the first forward a batch is divided; that is data. After the last backward comes the
    close, which is the optimizer's. What lies between parts is idle: on a CPU the library's own
    work and Python's. On several ranks the last backward reduces the gradients: what it takes
    beyond the others is communication.
    """
    split = dict.fromkeys(PARTS, 0.0)
    backwards: list[float] = []
    between = stamps.clock.between
    # Between two micro-batches: on CUDA the copy of the next one, on a CPU nothing but Python.
    ahead = "micro-step" if not stamps.tells_apart else "data" if stamps.clock.on_cuda else "idle"
    for (what, moment), (after, next_moment) in zip(
        stamps.marks[:-1], stamps.marks[1:], strict=True
    ):
        seconds = between(moment, next_moment)
        if what == "data" or (what == "start" and stamps.tells_apart):
            split["data"] += seconds
        elif what == "start":
            split["micro-step"] += seconds
            backwards.append(seconds)
        elif what == "forward":
            split["forward"] += seconds
        elif what == "backward":
            split["backward"] += seconds
            backwards.append(seconds)
        elif after == "end":
            split["optimizer"] += seconds
        else:
            split[ahead] += seconds
            if not stamps.tells_apart:
                backwards.append(seconds)
    if ranks > 1 and len(backwards) > 1:
        *others, last = backwards
        beyond = max(0.0, last - statistics.median(others))
        split["communication"] = beyond
        split["backward" if stamps.tells_apart else "micro-step"] -= beyond
    return split


def additions(
    split: dict[str, float], optimizer: torch.optim.Optimizer, clock: Clock, *, times: int
) -> dict[str, float]:
    """The split with what adding gradients takes told apart from the backward it is a part of.

    Measured by itself, on tensors like the gradients. Eager code keeps the first micro-batch's
    gradients as they come, and adds those of the others.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if times <= 0 or not parameters:
        return split
    sums = [torch.zeros_like(p) for p in parameters]
    once = [torch.zeros_like(p) for p in parameters]
    taken = []
    for _ in range(3):
        began = clock.now()
        torch._foreach_add_(sums, once)
        taken.append(clock.between(began, clock.now()))
    of = "backward" if split["backward"] else "micro-step"
    seconds = min(min(taken) * times, split[of] / 2)
    return {**split, of: split[of] - seconds, "addition": seconds}
