"""Where the time of a window goes, measured in a plain loop, and what to change."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from wholebatch.batch import split, to_device
from wholebatch.distributed.process_group import all_ranks, largest_over_ranks, world_size
from wholebatch.errors import OptionError
from wholebatch.gpus import find_gpu
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.memory.budget import device_name
from wholebatch.memory.operations import operation_counter
from wholebatch.readable_sizes import bytes_said
from wholebatch.tune.task import Task
from wholebatch.window import precision as precisions

PARTS = ("loading", "forward", "backward", "ranks wait", "reduction", "optimizer")
_CAUSES = {
    "input": ("loading",),
    "waiting": ("ranks wait",),
    "network": ("reduction",),
    "optimizer": ("optimizer",),
    "compute": ("forward", "backward"),
}
_CHANGE = {
    "input": "read ahead (workers in the recipe's defaults), or make samples cheaper",
    "waiting": "they wait for the slowest: look at its data, its device and what else runs there",
    "network": "more steps for each update (a larger batch) divide its share",
    "optimizer": "more steps for each update (a larger batch) divide its share",
    "compute": "bf16, or a larger micro-batch if micro-batches cost time by themselves",
}
_WINDOWS, _FEWEST, _SLOW = 5, 3, 2.0
"""Windows that are timed, those of slow ones, and the seconds of a slow one."""


@dataclass(frozen=True)
class Bottleneck:
    """The seconds of each part of a window: medians of several, means over the ranks."""

    seconds: dict[str, float]
    took: float
    """The seconds of a whole window, the same on all ranks: they wait for each other."""
    windows: int
    steps: int
    reduced: int
    """The bytes of gradients that ranks all-reduce once per window."""
    operations: int
    """Floating-point operations of forward and backward."""
    device: str
    sixteen_bit: bool = False
    """True if matrix products are computed in 16 bit."""

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part in the window."""
        return {name: part / (self.took or 1.0) for name, part in self.seconds.items()}

    @property
    def name(self) -> str:
        """What limits the window: "input", "waiting", "network", "optimizer" or "compute"."""
        shares = self.shares
        by_cause = {cause: sum(map(shares.__getitem__, of)) for cause, of in _CAUSES.items()}
        return max(by_cause, key=by_cause.__getitem__)

    @property
    def share_of_peak(self) -> float | None:
        """The share of the GPU's peak speed that forward and backward reach, if it is known."""
        try:
            peak = 1e12 * find_gpu(self.device).tflops(sixteen_bit=self.sixteen_bit)
        except OptionError:
            return None
        share = self.operations / (self.seconds["forward"] + self.seconds["backward"]) / peak
        return share if self.sixteen_bit or share <= 1 else None  # TF32 passes the peak of fp32

    def share_with(self, times: int) -> float:
        """Return the share of the reduction with so many times the steps for each update."""
        network, once = self.seconds["reduction"], self.seconds["optimizer"]
        return network / (network + once + times * (self.took - network - once))

    @property
    def lines(self) -> list[str]:
        """The parts, the bottleneck and what to change, in sentences."""
        parts = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items() if share)
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        lines = [
            f"a window of {steps} took {1000 * self.took:.1f} ms (median of {self.windows}): "
            f"{parts}"
        ]
        seconds = self.seconds["reduction"]
        if seconds:
            lines.append(
                f"ranks reduced {bytes_said(self.reduced)} in {1000 * seconds:.1f} ms, "
                f"{self.reduced / seconds / 1e9:.2g} GB/s, once all were there; 2, 4, 8 times the "
                "steps for each update would make its share "
                + ", ".join(f"{self.share_with(times):.0%}" for times in (2, 4, 8))
            )
        if self.share_of_peak is not None:
            name = "16-bit" if self.sixteen_bit else "fp32"
            lines.append(
                f"forward and backward reach {self.share_of_peak:.0%} of the GPU's {name} peak"
            )
        return [*lines, f"bottleneck: {self.name}; {_CHANGE[self.name]}"]


def find_bottleneck(task: Task, *, micro_batch: int, precision: str) -> Bottleneck:
    """Time the parts of windows in a plain loop, after one that warms up."""
    model, optimizer = task.build()
    model = getattr(model, "module", model)  # the reduction is timed by itself
    device = next(model.parameters()).device
    casts = precisions.choose(precision, device.type, keeps=False)
    counter = operation_counter()  # it slows the window that warms up
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    took: list[float] = []

    def timed(part: str, function: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        parts[part][-1] += time.perf_counter() - began
        return result

    def forward(micro: Any) -> list[torch.Tensor]:
        with casts.forward():
            loss = as_loss(task.loss(model, to_device(micro, device)))
        return [term.total for term in terms_of(loss).values()]

    def window(*, counts: bool = False) -> tuple[int, int]:
        """Make one window; return its micro-batches and the bytes that were reduced."""
        for spent in parts.values():
            spent.append(0.0)
        began = time.perf_counter()
        with counter if counts else nullcontext():
            micros = split(timed("loading", task.batches), micro_batch)
            for micro in micros:
                totals = timed("forward", partial(forward, micro))
                timed("backward", partial(torch.autograd.backward, totals))
        reduced = 0
        if world_size() > 1:
            flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            reduced = flat.nbytes
            # The slowest rank decides when a reduction can begin: that is not the network's time.
            timed("ranks wait", lambda: largest_over_ranks(0.0))
            timed("reduction", lambda: dist.all_reduce(flat))
        timed("optimizer", optimizer.step)
        optimizer.zero_grad(set_to_none=True)
        took.append(time.perf_counter() - began)
        return len(micros), reduced

    window(counts=True)
    parts = {name: [] for name in PARTS}
    took.clear()
    steps, reduced = window()
    is_slow = largest_over_ranks(took[0]) > _SLOW
    for _ in range((_FEWEST if is_slow else _WINDOWS) - 1):
        window()
    ranks = world_size()
    means = all_ranks().sum([*(median(spent) for spent in parts.values()), median(took)])
    *means, whole = (value / ranks for value in means)
    trained = (p for p in model.parameters() if p.requires_grad)
    return Bottleneck(
        dict(zip(PARTS, means, strict=True)),
        whole,
        len(took),
        steps,
        reduced,
        int(counter.get_total_flops()),
        device_name(device),
        precision in ("bf16", "fp16") or all(p.itemsize == 2 for p in trained),
    )
