"""The time of a window by part, from timestamps: the host's clock, or events on CUDA."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wholebatch.tune.settings import PARTS

__all__ = ["Busy", "Clock", "Stamps", "additions", "split_of"]


class Busy:
    """The share of the observed time in which the device worked; None if unknown."""

    def __init__(self) -> None:
        self.share: float | None = None

    def taken_out(self, split: dict[str, float]) -> dict[str, float]:
        """Return the split with the device's gaps as idle time, taken from all parts alike."""
        if self.share is None:
            return split
        share = min(1.0, self.share)
        result = {name: seconds * share for name, seconds in split.items()}
        result["idle"] = sum(split.values()) * (1 - share)
        return result


class Clock:
    """Timestamps, and the seconds between two of them."""

    def __init__(self, device: torch.device, host: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._host = host
        self.on_cuda = device.type == "cuda"

    def now(self) -> Any:
        """Return a timestamp; on CUDA it is when the work launched so far is done."""
        if not self.on_cuda:
            return self._host()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Return the seconds between two timestamps."""
        if not self.on_cuda:
            return float(second - first)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1000

    @contextmanager
    def watching(self) -> Iterator[Busy]:
        """Measure with CUDA's profiler how much of this time kernels were running."""
        busy = Busy()
        if not self.on_cuda:
            yield busy
            return
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            yield busy
            torch.cuda.synchronize(self._device)
        taken = time.perf_counter() - began
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if str(event.device_type).endswith("CUDA")
        )
        if spans:
            whole = max(taken, 1e-9)
            first, last = spans[0][0], max(end for _, end in spans)
            # Count from the first kernel to the last: starting the profiler takes time.
            busy.share = _covered(spans) / max(1e-9, min(whole * 1e6, last - first))


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans sorted by their start."""
    covered, at = 0.0, float("-inf")
    for start, end in spans:
        if end > at:
            covered += end - max(start, at)
            at = end
    return covered


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
