"""A training task: how to build the model, its loss, its batches, and options of `WholeBatch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from wholebatch.memory.meter import MemoryMeter, peak_with_recordings
from wholebatch.options import Samples
from wholebatch.whole_batch import WholeBatch


@dataclass(frozen=True)
class Task:
    """A model to train, built anew for every measurement.

    Args:
        build: A function that returns a new model, on its device, and its optimizer.
        loss: The loss function `loss(model, micro)`, as for `WholeBatch`.
        batches: A function that returns the next whole batch.
        options: Other options of `WholeBatch`, such as `units`, `clip_norm` and `batchnorm`.
    """

    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    loss: Callable[[Any, Any], Any]
    batches: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
    ) -> WholeBatch:
        """Return a `WholeBatch` with the task's options; those given here replace them."""
        if "micro_batch" in options:
            options["micro_batch"] = replace(self.samples, micro_batch=options["micro_batch"])
        return WholeBatch(model, optimizer, loss=self.loss, **{**self.options, **options})

    @property
    def samples(self) -> Samples:
        """How a batch is read."""
        return Samples.of(self.options.get("micro_batch", "auto"))


def measured_peak(
    window: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Run one window and return the most bytes that its tensors take at one moment.

    CUDA's allocator counts them itself. On a CPU every allocation is followed, which is slow.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        window()
        return peak_with_recordings(device)
    with MemoryMeter(model=model, optimizer=optimizer) as meter:
        window()
    return meter.peak
