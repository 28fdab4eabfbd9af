"""The measuring of windows: warm-up, time, peak memory, and several settings in turn.

Other work on a machine comes and goes, and can take half of it or more. It can only slow a window
down, so the faster half of the windows shows what a setting can do. Measured one after the other,
the setting that runs at that time looks slow. In turn, it affects all settings alike, and the
ratios within a round compare the settings themselves.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode

from wholebatch.errors import NonFiniteError
from wholebatch.memory.meter import MemoryMeter, peak_with_recordings
from wholebatch.readable_sizes import PARTS
from wholebatch.window.forward_state import replaced_attributes
from wholebatch.window.window import Step


def refuse_nonfinite(loss: float) -> None:
    """Refuse to measure windows that make no update, because their loss is not finite."""
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the loss of the first batch is {loss:g}, so that windows make no update and nothing "
            "can be measured: mend the model, the loss function or the data"
        )


@dataclass(eq=False)
class Busy:
    """The share of the observed time in which the device worked; None if unknown."""

    share: float | None = None

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


@dataclass(eq=False)
class Stamps:
    """The timestamps of one window: data, start, (forward, backward, done) × steps, end."""

    clock: Clock
    tells_apart: bool
    marks: list[tuple[str, Any]] = field(default_factory=list)

    def mark(self, what: str) -> None:
        """Record that `what` begins now."""
        self.marks.append((what, self.clock.now()))

    def after_micro(self, done: int, of: int) -> None:
        self.mark("done")


def split_of(stamps: Stamps, *, ranks: int = 1, alone: float | None = None) -> dict[str, float]:
    """Return the seconds of one window by part.

    Splitting the batch before the first forward counts as data. The close after the last backward
    counts as optimizer. Time between parts is idle: on a CPU it is the library's own work and
    Python's. With several ranks, the last backward reduces the gradients: its excess over the
    others, or over one that ran `alone`, is communication.
    """
    split = dict.fromkeys(PARTS, 0.0)
    backwards: list[float] = []
    # Between two micro-batches: on CUDA the copy of the next one, on a CPU only Python.
    ahead = "micro-step" if not stamps.tells_apart else "data" if stamps.clock.on_cuda else "idle"
    parts = {"data": "data", "start": "data" if stamps.tells_apart else "micro-step"}
    for (what, moment), (after, next_moment) in pairwise(stamps.marks):
        seconds = stamps.clock.between(moment, next_moment)
        part = what if what in ("forward", "backward") else parts.get(what)
        part = part or ("optimizer" if after == "end" else ahead)
        split[part] += seconds
        if part in ("backward", "micro-step"):
            backwards.append(seconds)
    if ranks > 1 and (len(backwards) > 1 or alone is not None):
        *others, last = backwards
        beyond = max(0.0, last - statistics.median(others or [alone or 0.0]))
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


Make = Callable[[], "tuple[nn.Module, torch.optim.Optimizer]"]


@dataclass(frozen=True)
class Workload:
    """The training to measure: how to make it, its loss, and the source of its batches."""

    make: Make
    loss: Callable[[Any, Any], Any]
    batches: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options for every `WholeBatch`, such as `units`, `clip_norm`, `batchnorm` and `static`."""
    clock: Callable[[], float] = time.perf_counter
    """The clock that times windows."""

    def fetch(self) -> tuple[Any, float]:
        """Return the next batch, and the seconds that it took."""
        began = self.clock()
        batch = self.batches()
        return batch, self.clock() - began


def settle(window: Callable[[], float], *, most: float) -> None:
    """Run windows until their time settles: caches are warm, graphs are made and captured."""
    last, spent = window(), 0.0
    while spent < most:
        seconds = window()
        spent += seconds
        if seconds > 0.9 * last:
            return
        last = seconds


def usual(values: Sequence[float]) -> float:
    """Return the median of the first half of the values, which must begin with the fastest."""
    return statistics.median(values[: -(-len(values) // 2)])


class PeakMeter:
    """Measures the peak bytes of tensors in a window, by CUDA's counters or by a meter."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meter: MemoryMeter | None = None

    def reset(self) -> None:
        """Forget the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def follow_thread(self) -> None:
        """Count in this thread too: some frameworks run their loss in others."""
        if self._meter is not None and self._meter not in _get_current_dispatch_mode_stack():
            _push_mode(self._meter)

    def peak(
        self, window: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> int:
        """Return the peak since the reset; without CUDA, of one more window."""
        if self._device.type == "cuda":
            return peak_with_recordings(self._device)
        meter = MemoryMeter(model=model, optimizer=optimizer)
        with meter, replaced_attributes(self, _meter=meter):
            window()
        return meter.peak


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class RunsWindows(Protocol):
    """Runs a window of a batch; the seconds include fetching and are the slowest rank's."""

    def window_of(self, batch: object, fetched: float) -> tuple[float, Step]: ...


@dataclass(frozen=True)
class Ratio:
    """The relative speed of two settings: the median of the rounds, and its 95% interval."""

    median: float
    low: float
    high: float


def ratio_of(values: Sequence[float]) -> Ratio:
    """Return the median with its distribution-free 95% interval.

    The number of values above the true median follows a binomial distribution, like coin tosses.
    Five values or fewer do not suffice for 95%: the interval then runs from the least to the
    greatest.

    >>> ratio_of([0.9, 1.0, 1.1])
    Ratio(median=1.0, low=0.9, high=1.1)
    >>> ratio_of([float(value) for value in range(1, 21)])
    Ratio(median=10.5, low=6.0, high=15.0)
    """
    ordered, number = sorted(values), len(values)
    beyond, out = 0.0, 0
    while out < number // 2 and (beyond := beyond + math.comb(number, out) / 2**number) <= 0.025:
        out += 1
    inner = max(0, out - 1)
    return Ratio(statistics.median(ordered), ordered[inner], ordered[number - 1 - inner])


@dataclass
class Turns:
    """Rounds of windows, one of each setting, in alternating order."""

    workload: Workload
    made: Sequence[RunsWindows]
    rounds: list[list[float]] = field(default_factory=list)
    """The seconds of each setting's window, by round."""
    units: list[float] = field(default_factory=list)

    def round(self) -> None:
        """Run one more window of each on the same batch; each one's time includes fetching it."""
        batch, fetched = self.workload.fetch()
        seconds = [0.0] * len(self.made)
        order = range(len(self.made))
        for at in order if len(self.rounds) % 2 else reversed(order):
            seconds[at], step = self.made[at].window_of(batch, fetched)
        self.rounds.append(seconds)
        self.units.append(step.units)

    def spent(self, at: int) -> float:
        """Return the total seconds of one setting."""
        return sum(seconds[at] for seconds in self.rounds)

    def rates(self, at: int) -> list[float]:
        """Return the units per second of one setting's windows, the fastest first."""
        pairs = zip(self.units, self.rounds, strict=True)
        return sorted((units / seconds[at] for units, seconds in pairs), reverse=True)

    def ratio(self, at: int, to: int) -> Ratio:
        """Return the speed of one setting relative to another."""
        return ratio_of([seconds[to] / seconds[at] for seconds in self.rounds])
