"""Where the time of a window goes, measured in a plain loop, and what to change."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from wholebatch.batch import split, to_device
from wholebatch.distributed.process_group import largest_over_ranks, world_size
from wholebatch.errors import OptionError
from wholebatch.gpus import find_gpu
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.memory.budget import device_name
from wholebatch.memory.operations import operation_counter
from wholebatch.readable_sizes import bytes_said
from wholebatch.tune.task import Task
from wholebatch.window import precision as precisions


@dataclass(frozen=True)
class Bottleneck:
    """The seconds of each part of a window, on the rank that took longest."""

    seconds: dict[str, float]
    steps: int
    reduced: int
    """The bytes of gradients that ranks all-reduce once per window."""
    operations: int
    """Floating-point operations of forward and backward."""
    device: str

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part in the window."""
        total = sum(self.seconds.values()) or 1.0
        return {name: part / total for name, part in self.seconds.items()}

    @property
    def name(self) -> str:
        """What limits the window: "input", "network", "optimizer" or "compute"."""
        shares = self.shares
        by_cause = {
            "input": shares["loading"],
            "network": shares["reduction"],
            "optimizer": shares["optimizer"],
            "compute": shares["forward"] + shares["backward"],
        }
        return max(by_cause, key=lambda cause: by_cause[cause])

    @property
    def share_of_peak(self) -> float | None:
        """The share of the GPU's peak speed that forward and backward reach, if it is known."""
        try:
            peak = 1e12 * find_gpu(self.device).tflops_16
        except OptionError:
            return None
        return self.operations / (self.seconds["forward"] + self.seconds["backward"]) / peak

    @property
    def lines(self) -> list[str]:
        """The parts, the bottleneck and what to change, in sentences."""
        parts = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items() if share)
        took = 1000 * sum(self.seconds.values())
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        lines = [f"a window of {steps} took {took:.1f} ms: {parts}"]
        share, seconds = self.shares["reduction"], self.seconds["reduction"]
        if seconds:
            lines.append(
                f"ranks reduced {bytes_said(self.reduced)} in {1000 * seconds:.1f} ms, "
                f"{self.reduced / seconds / 1e9:.2g} GB/s; 2, 4, 8 times the steps for each update "
                "would make its share "
                + ", ".join(f"{share / (share + k * (1 - share)):.0%}" for k in (2, 4, 8))
            )
        if self.share_of_peak is not None:
            lines.append(f"forward and backward reach {self.share_of_peak:.0%} of the GPU's peak")
        change = {
            "input": "read ahead with --workers, or make samples cheaper",
            "network": "more steps for each update (a larger batch) divide its share",
            "optimizer": "more steps for each update (a larger batch) divide its share",
            "compute": "bf16, or a larger micro-batch if micro-batches cost time by themselves",
        }
        return [*lines, f"bottleneck: {self.name}; {change[self.name]}"]


def find_bottleneck(task: Task, *, micro_batch: int, precision: str) -> Bottleneck:
    """Time the parts of one window in a plain loop, after one that warms up."""
    model, optimizer = task.build()
    model = getattr(model, "module", model)  # the reduction is timed by itself
    device = next(model.parameters()).device
    casts = precisions.choose(precision, device.type, keeps=False)
    seconds: dict[str, float] = {}

    def timed(part: str, function: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[part] += time.perf_counter() - began
        return result

    def forward(micro: Any) -> list[torch.Tensor]:
        with casts.forward():
            loss = as_loss(task.loss(model, to_device(micro, device)))
        return [term.total for term in terms_of(loss).values()]

    def reduce() -> int:
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        flat = torch.cat(parts)
        dist.all_reduce(flat)
        return flat.nbytes

    reduced, counter = 0, operation_counter()  # it slows the window that warms up
    for window in range(2):
        seconds.update(dict.fromkeys(("loading", "forward", "backward", "reduction"), 0.0))
        seconds["optimizer"] = 0.0
        with nullcontext() if window else counter:
            micros = split(timed("loading", task.batches), micro_batch)
            for micro in micros:
                totals = timed("forward", partial(forward, micro))
                timed("backward", partial(torch.autograd.backward, totals))
        if world_size() > 1:
            reduced = timed("reduction", reduce)
        timed("optimizer", optimizer.step)
        optimizer.zero_grad(set_to_none=True)
    slowest = {part: largest_over_ranks(spent) for part, spent in seconds.items()}
    return Bottleneck(
        slowest, len(micros), reduced, int(counter.get_total_flops()), device_name(device)
    )
