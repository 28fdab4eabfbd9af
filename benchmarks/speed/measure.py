"""One row: times one loop on one model, in a process of its own.

The process warms up (it compiles, records, and lets the allocator settle), says READY, and waits
for a line on its input before it times anything: "go" times some windows, after which it is READY
again; "end" makes it print its row. So several may get ready at once, and one at a time is timed.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from speed.device_time import profiled_windows
from speed.loops import LOOPS, synchronize
from speed.models import CASES, DEVICE, Case

__all__ = ["matmul_peak", "row"]

GIB = 2.0**30


def matmul_peak(size: int = 8192) -> float:
    """TFLOP/s of a bf16 matrix product on random data: what the device can do at all."""
    if DEVICE == "cpu":
        return 0.0
    left = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        left @ right
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        left @ right
    end.record()
    torch.cuda.synchronize()
    seconds = float(begin.elapsed_time(end)) / 1e3
    return 20 * 2 * size**3 / seconds / 1e12


def row(
    model: str, mode: str, micro: int, windows: int, seconds: float, *, profiled: bool = False
) -> None:
    """Print `ROW {...}` and end at once: nobody needs the memory to be freed tidily."""
    found: dict[str, Any] = {"model": model, "mode": mode, "micro": micro}
    try:
        found.update(_row(model, mode, micro, windows, seconds, profiled=profiled))
    except Exception as problem:
        traceback.print_exc()
        first = (str(problem).splitlines() or ["no message"])[0]
        found["error"] = f"{type(problem).__name__}: {first[:300]}"
    print(f"ROW {json.dumps(found)}", flush=True)
    sys.stdin.readline()  # what the driver says of this process is read meanwhile
    sys.stdout.flush()
    os._exit(0)


def _row(
    name: str, mode: str, micro: int, windows: int, seconds: float, *, profiled: bool
) -> dict[str, Any]:
    case = CASES[name]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = case.build()
    updates = LOOPS[mode](case, model, micro or case.window)
    losses = []
    began = time.perf_counter()
    for _ in range(max(4, 2 * case.windows + 1)):  # every shape twice, where shapes differ
        losses.append(next(updates))
        synchronize()
        sys.stderr.write(f"window {len(losses)} after {time.perf_counter() - began:.1f} s\n")
    warm = time.perf_counter() - began
    peak_of_warm_up = torch.cuda.max_memory_allocated() / GIB
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    turns: list[Turn] = []
    while _told() == "go":
        losses.append(next(updates))  # the device's clocks come up again
        turns.append(_timed(updates, losses, windows, seconds))
    return {
        **_summed_up(case, turns),
        **(profiled_windows(lambda: next(updates)) if profiled else {}),
        "pools": _pools(),
        "warm_up_gib": peak_of_warm_up,
        "warm_up_s": warm,
        "losses": [loss if math.isfinite(loss) else None for loss in losses[:5]],
    }


def _told() -> str:
    """Say that this process is ready, and wait for a word."""
    print("READY", flush=True)
    return sys.stdin.readline().strip()


@dataclass(frozen=True)
class Turn:
    """Windows that were timed back to back: the seconds of each, of all, and joules of one."""

    times: list[float]
    worked: list[float]
    """Seconds of the processor in each, all threads together."""
    mean: float
    joules: float | None


def _timed(updates: Iterator[float], losses: list[float], windows: int, seconds: float) -> Turn:
    synchronize()
    times: list[float] = []
    worked: list[float] = []
    joules = _joules()
    begin = last = time.perf_counter()
    before = time.process_time()
    while len(times) < windows and (not times or last - begin < seconds):
        losses.append(next(updates))
        now = time.perf_counter()
        times.append(now - last)
        last = now
        after = time.process_time()
        worked.append(after - before)
        before = after
    synchronize()
    mean = (time.perf_counter() - begin) / len(times)
    used = _joules()
    each = None if used is None or joules is None else (used - joules) / len(times)
    return Turn(times, worked, mean, each)


def _summed_up(case: Case, turns: list[Turn]) -> dict[str, Any]:
    """The median window; the mean over all that ran back to back says whether it is typical."""
    times = sorted(seconds for turn in turns for seconds in turn.times)
    median = statistics.median(times)
    joules = [turn.joules for turn in turns if turn.joules is not None]
    units = case.window * case.units_per_sample
    return {
        "ms": 1e3 * median,
        "processor_ms": 1e3 * statistics.median(s for turn in turns for s in turn.worked),
        "mean_ms": 1e3 * statistics.fmean(turn.mean for turn in turns),
        "fastest_ms": 1e3 * times[0],
        "slowest_ms": 1e3 * times[-1],
        "windows": len(times),
        "joules": statistics.median(joules) if joules else None,
        "units_per_s": units / median,
        "units": case.units,
        "tflops": case.flops_per_unit * units / median / 1e12,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.memory_reserved() / GIB,
    }


def _pools() -> dict[str, list[float]]:
    """GiB that each pool of the allocator holds, has live tensors in, and its largest segment."""
    pools: dict[str, list[float]] = {}
    for segment in torch.cuda.memory_snapshot() if DEVICE == "cuda" else []:
        name = f"pool {segment['segment_pool_id']} of stream {segment['stream']}"
        held, live, largest = pools.get(name, (0.0, 0.0, 0.0))
        size = segment["total_size"] / GIB
        live += segment["active_size"] / GIB
        pools[name] = [held + size, live, max(largest, size)]
    return pools


def _joules() -> float | None:
    """What the device has used since the driver was loaded, where the driver tells."""
    if DEVICE != "cuda":
        return None
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except Exception:  # no such package, or a driver that does not tell
        return None
