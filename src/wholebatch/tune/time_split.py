"""The time of a window by part, from timestamps taken along the way."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from wholebatch.tune.device_clock import Clock
from wholebatch.tune.settings import PARTS

__all__ = ["Stamps", "additions", "split_of"]


class Stamps:
    """The timestamps of one window: data, start, (forward, backward, done) × steps, end."""

    def __init__(self, clock: Clock, *, tells_apart: bool) -> None:
        self.clock = clock
        self.tells_apart = tells_apart
        self.marks: list[tuple[str, Any]] = []

    def mark(self, what: str) -> None:
        """Record that `what` begins now."""
        self.marks.append((what, self.clock.now()))

    def after_micro(self, done: int, of: int) -> None:
        """Record that a micro-batch is done."""
        self.mark("done")


def split_of(stamps: Stamps, *, ranks: int = 1) -> dict[str, float]:
    """Return the seconds of one window by part.

    Splitting the batch before the first forward counts as data. The close after the last backward
    counts as optimizer. Time between parts is idle: on a CPU it is the library's own work and
    Python's. With several ranks, the last backward reduces the gradients: its excess over the
    others is communication.
    """
    split = dict.fromkeys(PARTS, 0.0)
    backwards: list[float] = []
    between = stamps.clock.between
    # Between two micro-batches: on CUDA the copy of the next one, on a CPU only Python.
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
    """Return the split with the addition of gradients separated from the backward.

    It is measured separately, on tensors like the gradients. Eager code keeps the first
    micro-batch's gradients as they are and adds those of the others.
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
