"""The device's own clock: the time of windows, their longest kernels, and the gaps between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

__all__ = ["mark", "milliseconds", "profiled_windows", "shown"]


def mark() -> Any:
    """Note the time at which the device has done all its work so far; nothing waits for it."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(marks: Sequence[Any]) -> list[float]:
    """Return the time from each mark to the next."""
    if not torch.cuda.is_available():
        return [1000 * (after - before) for before, after in pairwise(marks)]
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def profiled_windows(window: Callable[[], Any], windows: int = 2) -> dict[str, Any]:
    """Return the longest kernels of a window, and when there was none."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(windows):
            window()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.key)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    )
    all_of: dict[str, tuple[float, int]] = {}
    for start, end, name in spans:
        ms, count = all_of.get(name, (0.0, 0))
        all_of[name] = (ms + (end - start) / 1e3 / windows, count + 1)
    kernels = sorted(((ms, n / windows, name) for name, (ms, n) in all_of.items()), reverse=True)
    return {
        "kernel_ms": sum(ms for ms, _, _ in kernels),
        "kernels": kernels[:32],
        **_gaps(spans, windows),
    }


def _gaps(spans: list[tuple[float, float, str]], windows: int) -> dict[str, Any]:
    """Where the device had nothing to run: short gaps in all, and each of the long ones."""
    short, long, until, last = 0.0, list[tuple[float, str, str]](), math.inf, ""
    for start, end, name in spans:
        if start - until > 20.0:  # microseconds
            long.append((start - until, last, name))
        else:
            short += max(0.0, start - until)
        if until == math.inf or end > until:
            until, last = end, name
    return {
        "short_gaps_ms": short / 1e3 / windows,
        "long_gaps_ms": sum(gap for gap, _, _ in long) / 1e3 / windows,
        "long_gaps": [(gap, a[:80], b[:80]) for gap, a, b in sorted(long, reverse=True)[:16]],
    }


def shown(found: dict[str, Any]) -> str:
    """Return the kernels and gaps as lines."""
    short, long = found["short_gaps_ms"], found["long_gaps_ms"]
    return "\n".join(
        [
            f"  {found['kernel_ms']:.1f} ms of kernels, idle {short:.1f} ms in gaps of up to 20 us "
            f"and {long:.1f} ms in longer ones",
            *(f"  {ms:8.2f} ms {n:7.1f} x {name[:150]}" for ms, n, name in found["kernels"]),
            *(
                f"  {us / 1e3:8.2f} ms idle after {a}, before {b}"
                for us, a, b in found["long_gaps"]
            ),
        ]
    )
