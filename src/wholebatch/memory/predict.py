"""The peak memory of a training step at a micro-batch size, without running it.

```python
prediction = predict_peak(model, loss, micro, optimizer=optimizer, precision="bf16")
prediction.peak, prediction.by_category["activations"]
```

A whole window (forward and backward of the micro-batches, the update) runs on fake tensors, which
have shapes but no data, under the same meter that counts a real run. On the CPU the two agree to
the byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from wholebatch.coupled.batchnorm.lock_step import Hold
from wholebatch.errors import OptionError
from wholebatch.memory.fake_windows import CUDA_WORKSPACES, Ran, Rehearsal, Way
from wholebatch.memory.fsdp_sharding import Sharding, pretended_ranks
from wholebatch.memory.offload_memory import check_gradients
from wholebatch.memory.plain_window import PlainWindow, Reduction

__all__ = [
    "CUDA_WORKSPACES",
    "PlainWindow",
    "Prediction",
    "Predictor",
    "Reduction",
    "Sharding",
    "predict_peak",
    "target_device",
]

_ENOUGH_IN_LOCK_STEP = 3
"""The number of lock-step micro-batches to simulate; each further one adds the same bytes."""


@dataclass(frozen=True)
class Prediction:
    """The predicted peak of a training step in bytes, and its parts by category."""

    peak: int
    by_category: dict[str, int]
    seconds: float
    """The time that the prediction took."""
    largest: int = 0
    """The largest single allocation of the step.

    Free memory is fragmented, so an allocator needs room for one more of these.
    """


class Predictor:
    """Predictions for one model, loss and optimizer; later ones are faster than the first.

    The model and the optimizer must not change, except for checkpointing of the model's blocks.
    `device` is where the steps would run (default: the model's device).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.device = target_device(model, device)
        self._rehearsal = Rehearsal(model, loss, optimizer=optimizer, target=self.device)

    def peak(
        self,
        batch: Any,
        *,
        precision: str = "full",
        micro_batches: int = 2,
        first: bool = False,
        lock_step: Hold | None = None,
        reduction: Reduction | None = None,
        gradients: str = "device",
        noise: bool = False,
        sharding: Sharding | None = None,
    ) -> Prediction:
        """Predict the peak for micro-batches like `batch`; the options are `predict_peak`'s."""
        if micro_batches < 1:
            raise OptionError(f"micro_batches={micro_batches}: must be at least 1")
        check_gradients(gradients)
        if sharding is not None and (gradients != "device" or lock_step is not None):
            raise OptionError(
                f"sharding with gradients={gradients!r} or micro-batches in lock-step:"
                " a sharded model keeps its gradients where its engine does, and its micro-batches"
                " run one after the other"
            )
        began = time.perf_counter()
        way = Way(
            precision=precision,
            first=first,
            lock_step=lock_step,
            # Gradients off the device are reduced one bucket at a time, at the close.
            reduction=reduction if gradients == "device" else None,
            gradients=gradients,
            noise=noise and gradients == "device",  # Otherwise noise is not measured.
            sharding=sharding,
        )

        def run(count: int) -> Ran:
            with nullcontext() if sharding is None else pretended_ranks(sharding.ranks):
                return self._rehearsal.run(batch, replace(way, micro_batches=count))

        if lock_step is None:
            ran = run(min(micro_batches, 2))  # The third starts from the same state as the second.
        elif micro_batches <= _ENOUGH_IN_LOCK_STEP:
            ran = run(micro_batches)
        else:
            ran = _continued(
                run(_ENOUGH_IN_LOCK_STEP - 1),
                run(_ENOUGH_IN_LOCK_STEP),
                micro_batches - _ENOUGH_IN_LOCK_STEP,
            )
        by_category = max(ran.adding, ran.stepping, key=lambda one: sum(one.values()))
        return Prediction(
            sum(by_category.values()), by_category, time.perf_counter() - began, ran.largest
        )


def predict_peak(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    micro_batches: int = 2,
    device: torch.device | str | None = None,
    first: bool = False,
    lock_step: Hold | None = None,
    reduction: Reduction | None = None,
    gradients: str = "device",
    noise: bool = False,
    sharding: Sharding | None = None,
) -> Prediction:
    """Predict the peak of a training step with micro-batches like `batch`.

    The step is one in the middle of a run: the optimizer's state exists already (`first=True` asks
    for the first step, which creates it). From the second micro-batch on, gradients exist during
    forward and backward, so two micro-batches stand for any larger number.

    `lock_step` is what micro-batches that meet at every BatchNorm hold ("graphs", "inputs"); all
    `micro_batches` then count. `reduction` adds the buckets in which data-parallel ranks sum their
    gradients: "overlap" in the last backward, or "after" it. `gradients` is their place, as in
    `WholeBatch` ("host" saves nothing if the device is the CPU). `noise` adds the memory of a
    window that measures the gradient noise scale. `sharding` predicts one rank of a model sharded
    by FSDP2.

    The model may be on any device, also `meta`; it is neither run nor changed. `device` is where
    the step would run (default: the model's device). For a CUDA device that this machine lacks,
    the CPU's operations are counted with CUDA's block sizes.
    """
    return Predictor(model, loss, optimizer=optimizer, device=device).peak(
        batch,
        precision=precision,
        micro_batches=micro_batches,
        first=first,
        lock_step=lock_step,
        reduction=reduction,
        gradients=gradients,
        noise=noise,
        sharding=sharding,
    )


def _continued(before: Ran, last: Ran, more: int) -> Ran:
    """Extrapolate to `more` lock-step micro-batches, each adding as much as the last one."""
    adding = {
        name: size + more * (size - before.adding[name]) for name, size in last.adding.items()
    }
    return Ran(adding, last.stepping, last.largest)


def target_device(model: torch.nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device of the step: as given, else the model's; the CPU for a meta model."""
    if device is not None:
        return torch.device(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")
