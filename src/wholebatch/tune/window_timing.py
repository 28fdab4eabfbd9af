"""The measuring of windows: warm-up, time, peak memory, and several settings in turn.

Other work on a machine comes and goes, and can take half of it or more. It can only slow a window
down, so the faster half of the windows shows what a setting can do. Measured one after the other,
the setting that runs at that time looks slow. In turn, it affects all settings alike, and the
ratios within a round compare the settings themselves.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode

from wholebatch.core.window import Step
from wholebatch.memory.meter import MemoryMeter, peak_with_recordings

__all__ = [
    "Make",
    "PeakMeter",
    "Ratio",
    "Turns",
    "Workload",
    "free_device",
    "ratio_of",
    "settle",
    "usual",
    "wait_for",
]

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
        """Count in this thread too: lock-step and some frameworks run their loss in others."""
        if self._meter is not None and self._meter not in _get_current_dispatch_mode_stack():
            _push_mode(self._meter)

    def peak(
        self, window: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> int:
        """Return the peak since the reset; without CUDA, of one more window."""
        if self._device.type == "cuda":
            return peak_with_recordings(self._device)
        with MemoryMeter(model=model, optimizer=optimizer) as meter:
            self._meter = meter
            try:
                window()
            finally:
                self._meter = None
        return meter.peak


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_device(device: torch.device) -> None:
    """Give back the memory of what is no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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

    def ratio(self, at: int, to: int) -> Ratio:
        """Return the speed of one setting relative to another."""
        return ratio_of([seconds[to] / seconds[at] for seconds in self.rounds])
