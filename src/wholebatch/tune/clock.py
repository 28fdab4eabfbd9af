"""When something happened: the host's clock on a CPU, events of the stream on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Busy", "Clock"]


class Busy:
    """How much of the watched time the device worked; `share` is None where nobody can tell."""

    def __init__(self) -> None:
        self.share: float | None = None

    def taken_out(self, split: dict[str, float]) -> dict[str, float]:
        """A split in which the device's gaps are idle time, taken from its parts in proportion."""
        if self.share is None:
            return split
        share = min(1.0, self.share)
        result = {name: seconds * share for name, seconds in split.items()}
        result["idle"] = sum(split.values()) * (1 - share)
        return result


class Clock:
    """Moments, and the seconds between two of them."""

    def __init__(self, device: torch.device, host: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._host = host
        self.on_cuda = device.type == "cuda"

    def now(self) -> Any:
        """This moment: on CUDA the one at which the work that was launched so far is done."""
        if not self.on_cuda:
            return self._host()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds."""
        if not self.on_cuda:
            return float(second - first)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1000

    @contextmanager
    def watching(self) -> Iterator[Busy]:
        """Let CUDA's profiler say how much of this time kernels were running."""
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
            # Of the time between the first kernel and the last: starting the profiler takes some.
            busy.share = _covered(spans) / max(1e-9, min(whole * 1e6, last - first))


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans that are sorted by their start."""
    covered, at = 0.0, float("-inf")
    for start, end in spans:
        if end > at:
            covered += end - max(start, at)
            at = end
    return covered
