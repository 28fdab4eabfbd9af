"""The measured speed of this machine: matrix products, copies, all-reduces.

`RanksModel` is a model of the time on more ranks. Every rank runs the tuned window on its own data.
Gradients are reduced once per window by a ring all-reduce, which sends `2 (n − 1) / n` of their
bytes over each rank's link, in `2 (n − 1)` messages. The reduction overlaps with the last
micro-batch's backward, or not at all: the truth lies between.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wholebatch.batch import batch_size_of, to_device
from wholebatch.distributed.process_group import largest_over_ranks, world_size
from wholebatch.errors import OptionError, WholebatchError
from wholebatch.memory.choose_micro_batch import resize_batch
from wholebatch.memory.plain_window import PlainWindow
from wholebatch.readable_sizes import bytes_said
from wholebatch.tune.settings import Trial
from wholebatch.tune.window_timing import Clock, Workload

_WIDTH = {"cpu": 1024, "cuda": 8192}
_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def share_of_arithmetic(
    workload: Workload, best: Trial, batch: Any, *, device: torch.device, dtype: torch.dtype
) -> float | None:
    """Return the share of a large matrix product's speed that forward and backward reach."""
    parts = ("forward", "backward", "micro-step", "addition")
    seconds = sum(best.split.get(part, 0.0) for part in parts)
    precision = best.setting.mode.precision
    model: nn.Module = workload.make()[0]
    inner = getattr(model, "module", model)
    size = min(best.setting.micro_batch, 8)
    static = workload.options.get("static", ())
    try:
        samples = batch_size_of(batch, static=static)
        micro = to_device(resize_batch(batch, size, static=static), device)
        counted = _flops_of(inner, workload.loss, micro, precision=precision)
    except (RuntimeError, WholebatchError):
        return None  # The loss cannot run on these samples: do without this evidence.
    if counted is None or not seconds:
        return None
    fastest = _best_flops(device, precision, dtype, workload.clock)
    return counted / size * samples / seconds / fastest


def _seconds(
    device: torch.device,
    work: Callable[[], object],
    *,
    times: int,
    host: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of the fastest of some runs, after one that is not timed."""
    clock = Clock(device, host)
    work()
    taken = []
    for _ in range(times):
        began = clock.now()
        work()
        taken.append(clock.between(began, clock.now()))
    return min(taken)


def _best_flops(
    device: torch.device, precision: str, dtype: torch.dtype, host: Callable[[], float]
) -> float:
    """Return the FLOP/s of a large square matrix product here, by the clock of the windows."""
    kind = _DTYPE.get(precision, dtype)
    width = _WIDTH.get(device.type, 1024)
    one = torch.randn(width, width, device=device).to(kind)
    seconds = _seconds(device, lambda: torch.mm(one, one), times=5, host=host)
    return 2.0 * width**3 / seconds


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes, beyond any cache."""
    numbers = 2**26 if device.type == "cuda" else 2**24
    source, target = (torch.zeros(numbers, device=device) for _ in range(2))
    seconds = _seconds(device, lambda: target.copy_(source), times=3)
    return 2.0 * source.nbytes / seconds


def _flops_of(
    model: nn.Module, loss: Callable[[Any, Any], Any], micro: Any, *, precision: str
) -> int | None:
    """Count the floating-point operations of one forward and backward; None if none were seen."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(PlainWindow(model, loss, precision=precision).totals(micro))
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops() or None


def reduce_bandwidth(device: torch.device, numbers: int) -> float | None:
    """Return the bytes per second of an all-reduce of this many numbers; None on one rank.

    It follows the model in `ranks_model`: a ring moves 2 (n − 1) / n of the bytes.
    """
    ranks = world_size()
    if ranks == 1:
        return None
    sums = torch.zeros(numbers, device=device)
    seconds = _seconds(device, lambda: torch.distributed.all_reduce(sums), times=3)
    return 2 * (ranks - 1) / ranks * sums.nbytes / largest_over_ranks(seconds)


_UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "kbit": 125.0, "Mbit": 125e3, "Gbit": 125e6}
_BANDWIDTH = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMG]?(?:B|bit))(?:/s)?\s*")


def parse_bandwidth(text: str) -> float:
    """Parse the bandwidth of a link into bytes per second.

    >>> parse_bandwidth("25GB/s"), parse_bandwidth("100 Gbit/s")
    (25000000000.0, 12500000000.0)
    """
    match = _BANDWIDTH.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise OptionError(
            f'bandwidth {text!r}: must be a rate of one rank\'s link such as "25GB/s" or '
            '"100Gbit/s"'
        )
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class RanksModel:
    """The seconds of a window over ranks, from one rank's window and the bandwidth of a link."""

    window: float
    last_backward: float
    units: float
    bytes_reduced: int
    bandwidth: float
    measured: bool
    latency: float = 20e-6

    def reduction(self, ranks: int) -> float:
        """Return the seconds of the reduction alone."""
        if ranks == 1:
            return 0.0
        return (
            2 * (ranks - 1) / ranks * self.bytes_reduced / self.bandwidth
            + 2 * (ranks - 1) * self.latency
        )

    def point(self, ranks: int) -> dict[str, float]:
        """Return the window on this many ranks, without any overlap and with full overlap."""
        reduction = self.reduction(ranks)
        slowest = self.window + reduction
        fastest = self.window + max(0.0, reduction - self.last_backward)
        return {
            "ranks": ranks,
            "seconds": slowest,
            "seconds_overlapped": fastest,
            "units_per_second": ranks * self.units / slowest,
            "units_per_second_overlapped": ranks * self.units / fastest,
            "communication_share": reduction / slowest,
        }

    def to_dict(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Return the model at these numbers of ranks, marked as a model."""
        how = "measured here" if self.measured else "as given"
        return {
            "is_model": True,
            "said": (
                f"A model: {bytes_said(self.bytes_reduced)} of gradients reduced once per window "
                f"by a ring over links of {self.bandwidth / 1e9:.3g} GB/s ({how}); every rank "
                "makes the tuned window. No such cluster was measured."
            ),
            "bytes_reduced": self.bytes_reduced,
            "bandwidth": self.bandwidth,
            "bandwidth_measured": self.measured,
            "latency": self.latency,
            "points": [self.point(n) for n in sorted({1, *ranks})],
        }
