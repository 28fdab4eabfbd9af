"""The peak memory of a training step at a micro-batch size, without running it.

```python
prediction = predict_peak(model, loss, micro, optimizer=optimizer, precision="bf16")
prediction.peak, prediction.by_category["activations"]
```

A whole window (forward and backward of the micro-batches, the update) runs on fake tensors, which
have shapes but no bytes, under the same meter that counts a real run. On the CPU the two agree to
the byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from wholebatch.errors import OptionError
from wholebatch.memory.plain import PlainWindow, Reduction
from wholebatch.memory.rehearse import CUDA_WORKSPACES, Ran, Rehearsal, Way
from wholebatch.memory.sharding import Sharding, pretended_ranks
from wholebatch.memory.stores import check_gradients
from wholebatch.runners.lockstep import Hold

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
"""Micro-batches in lock-step that are really looked at; from there on each adds the same."""


@dataclass(frozen=True)
class Prediction:
    """The bytes that a training step will have alive at its peak, and what they are for."""

    peak: int
    by_category: dict[str, int]
    seconds: float
    """How long the prediction took."""
    largest: int = 0
    """The largest single piece that the step asks for. An allocator that cannot move memory needs
    room for one more of these: what is free is in pieces."""


class Predictor:
    """Predictions for one model, loss and optimizer: the second costs less than the first.

    The optimizer, and the model but for checkpointing of its blocks, must stay as they are.
    `device` is where the steps would run (default: where the model is).
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
        """What `predict_peak` says for micro-batches like `batch`."""
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
            # What has left the device is reduced a bucket at a time, at the close.
            reduction=reduction if gradients == "device" else None,
            gradients=gradients,
            noise=noise and gradients == "device",  # else it is not measured
            sharding=sharding,
        )

        def run(count: int) -> Ran:
            with nullcontext() if sharding is None else pretended_ranks(sharding.ranks):
                return self._rehearsal.run(batch, replace(way, micro_batches=count))

        if lock_step is None:
            ran = run(min(micro_batches, 2))  # the third finds what the second did
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
    """The peak of a training step with micro-batches like `batch`, as (bytes, by category).

    The step is one of a run that goes on: the optimizer's state is there already (`first=True`
    asks for the first step instead, which makes it). From the second micro-batch on, gradients
    are there while the next forward and backward run, so two stand for any larger number.

    `lock_step` says what is held of micro-batches that meet at every BatchNorm ("graphs",
    "inputs"); all `micro_batches` then count. `reduction` adds the buckets in which data-parallel
    ranks sum their gradients: "overlap" in the last backward, or "after" it. `gradients` says where
    they go, as `WholeBatch` has it ("host" gains nothing where the host is the device). `noise`
    counts what a window holds in which the gradient noise scale is measured. `sharding` is for one
    rank of several among which FSDP2 shards the model.

    The model may live on any device, also `meta`; it is neither run nor changed. `device` is
    where the step would run (default: where the model is). For a CUDA device that this machine
    does not have, the CPU's operations are counted with CUDA's block sizes.
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
    """Each further micro-batch in lock-step adds what the last one added; the step is the same."""
    adding = {
        name: size + more * (size - before.adding[name]) for name, size in last.adding.items()
    }
    return Ran(adding, last.stepping, last.largest)


def target_device(model: torch.nn.Module, device: torch.device | str | None) -> torch.device:
    """Where the step is to run: as asked, or where the model is; a meta model would be on a CPU."""
    if device is not None:
        return torch.device(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")
