"""Clocks: the host's clock on a CPU, stream events on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Busy", "Clock"]


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
