"""A plan of how a model and a batch fit a device: peaks by size, and the choice.

Everything here is predicted. It needs neither the device nor memory for the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from wholebatch.batch.samples import Static
from wholebatch.errors import OptionError
from wholebatch.memory.choose_micro_batch import choose_micro_batch, resize_batch
from wholebatch.memory.fake_tensors import shapes_of
from wholebatch.memory.fsdp_sharding import SYNCS, Sharding, wire_bytes
from wholebatch.memory.predict import Prediction, simulating, target_device


@dataclass(frozen=True)
class Point:
    """The memory that one micro-batch size needs on every device."""

    micro_batch: int
    peak: int
    by_category: dict[str, int]
    fits: bool
    needed: int
    """The peak, and on CUDA the room that the allocator needs beside it."""


@dataclass(frozen=True)
class Mode:
    """A way to keep a sharded model's parameters and gradients in a window."""

    sync: str
    peak: int
    """The bytes of a device with the same micro-batch."""
    fits: bool
    wire: int
    """The bytes that a rank receives in a window."""


@dataclass(frozen=True)
class Plan:
    """The plan for a batch on devices: micro-batch × steps × ranks = global batch."""

    batch_size: int
    ranks: int
    budget: int
    precision: str
    points: tuple[Point, ...]
    micro_batch: int | None
    """The recommended size: among those with this number of steps, the one that makes them even.
    None if not even one sample fits."""
    largest: int | None
    """The largest size that fits."""
    steps: int
    sync: str | None = None
    """The time at which a sharded model reduces its gradients; None if it is not sharded."""
    checkpointing: bool = False
    undivided: int | None = None
    """The bytes that a device must have for its share of the batch in one piece."""
    modes: tuple[Mode, ...] = ()
    """The ways of a sharded model, with the recommended micro-batch, or with one sample."""


def make_plan(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    batch_size: int,
    budget: int,
    ranks: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    device: torch.device | str | None = None,
    static: Static = (),
    sharding: Sharding | None = None,
    checkpoints: bool = False,
    beside_undivided: bool = False,
) -> Plan:
    """Plan updates of `batch_size` samples over `ranks` devices with `budget` bytes each.

    `sharding` spreads the model over them by FSDP2, block by block. Otherwise each device holds the
    whole model. With `beside_undivided`, the share of a device in one piece is predicted, too.
    """
    _check_sizes(batch_size, ranks, budget)
    device = target_device(model, device)
    most = -(-batch_size // ranks)
    shapes = shapes_of(batch)
    by_size: dict[int, Prediction] = {}
    # Data-parallel ranks all-reduce buckets of gradients during the last backward.
    how: dict[str, Any] = {"reduces": ranks > 1 and sharding is None, "device": device}
    with simulating(model, loss, optimizer=optimizer, **how) as simulation:

        def peak(size: int) -> int:
            """Return the bytes that a device must have for this size."""
            if size not in by_size:
                by_size[size] = simulation.predict(
                    resize_batch(shapes, size, static=static),
                    precision=precision,
                    micro_batches=-(-most // size),
                    checkpoints=checkpoints,
                )
            return by_size[size].sharded(model, sharding).needed(device)

        choice = choose_micro_batch(peak, budget=budget, most=most, growth=64)
        largest = 1 if choice is None else choice.micro_batch
        steps = -(-most // largest)
        even = -(-most // steps)
        if choice is not None:
            peak(even)
        undivided = peak(most) if beside_undivided else None
    points = []
    for size, whole in sorted(by_size.items()):
        found, needed = whole.sharded(model, sharding), peak(size)
        points.append(Point(size, found.peak, found.by_category, needed <= budget, needed))
    modes = []
    if sharding is not None:
        size, count = (1, most) if choice is None else (even, steps)
        for sync in SYNCS:
            other = Sharding(sharding.ranks, sync)
            found = by_size[size].sharded(model, other)
            wire = wire_bytes(model, other, count)
            modes.append(Mode(sync, found.peak, found.needed(device) <= budget, wire))
    return Plan(
        batch_size=batch_size,
        ranks=ranks,
        budget=budget,
        precision=precision,
        points=tuple(points),
        micro_batch=None if choice is None else even,
        largest=None if choice is None else largest,
        steps=0 if choice is None else steps,
        sync=None if sharding is None else sharding.sync,
        checkpointing=checkpoints,
        undivided=undivided,
        modes=tuple(modes),
    )


def _check_sizes(batch_size: int, ranks: int, budget: int) -> None:
    for name, value in (("batch_size", batch_size), ("ranks", ranks), ("budget", budget)):
        if value < 1:
            raise OptionError(f"{name}={value}: must be at least 1")
    if batch_size < ranks:
        raise OptionError(
            f"batch_size={batch_size} on {ranks} ranks: must be at least one sample for each"
        )
