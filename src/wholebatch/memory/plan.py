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
from wholebatch.memory.fsdp_sharding import Sharding
from wholebatch.memory.make_it_fit import Rung, ladder
from wholebatch.memory.predict import Prediction, simulating, target_device


@dataclass(frozen=True)
class Point:
    """The memory that one micro-batch size needs on every device."""

    micro_batch: int
    peak: int
    by_category: dict[str, int]
    fits: bool


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
    None if not even one sample fits; `rungs` then lists what would help."""
    largest: int | None
    """The largest size that fits."""
    steps: int
    rungs: tuple[Rung, ...]
    seconds: float
    sync: str | None = None
    """The time at which a sharded model reduces its gradients; None if it is not sharded."""

    def arithmetic(self) -> str:
        """Return the arithmetic of the batch as one line, to print before training begins."""
        if self.micro_batch is None:
            return "no micro-batch fits"
        per_rank = -(-self.batch_size // self.ranks)
        last = per_rank - (self.steps - 1) * self.micro_batch
        uneven = "" if last == self.micro_batch else f", the last of {last}"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        product = f"micro-batch {self.micro_batch} × {steps} × {ranks}"
        if self.batch_size % self.ranks:
            uneven += f"; {per_rank} or {per_rank - 1} on a rank"
        samples = "1 sample" if self.batch_size == 1 else f"{self.batch_size} samples"
        return f"{product} = {samples}{uneven}"


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
) -> Plan:
    """Plan updates of `batch_size` samples over `ranks` devices with `budget` bytes each.

    `sharding` spreads the model over them by FSDP2, block by block. Otherwise each device holds the
    whole model.
    """
    _check_sizes(batch_size, ranks, budget)
    device = target_device(model, device)
    most = -(-batch_size // ranks)
    shapes = shapes_of(batch)
    made: dict[int, Prediction] = {}
    # Data-parallel ranks all-reduce buckets of gradients during the last backward.
    how: dict[str, Any] = {"reduces": ranks > 1 and sharding is None, "sharding": sharding}
    with simulating(model, loss, optimizer=optimizer, device=device, **how) as simulation:

        def peak(size: int) -> int:
            """Return the bytes that a device must have for this size."""
            if size not in made:
                micro = resize_batch(shapes, size, static=static)
                steps = -(-most // size)
                made[size] = simulation.predict(micro, precision=precision, micro_batches=steps)
            return made[size].needed(device)

        choice = choose_micro_batch(peak, budget=budget, most=most, growth=64)
        largest = 1 if choice is None else choice.micro_batch
        steps = -(-most // largest)
        even = -(-most // steps)
        rungs: list[Rung] = []
        if choice is not None:
            peak(even)
        else:
            sample = resize_batch(shapes, 1, static=static)
            rungs = ladder(simulation, sample, budget=budget, precision=precision, as_is=made[1])
    return Plan(
        batch_size=batch_size,
        ranks=ranks,
        budget=budget,
        precision=precision,
        points=tuple(
            Point(size, made[size].peak, made[size].by_category, peak(size) <= budget)
            for size in sorted(made)
        ),
        micro_batch=None if choice is None else even,
        largest=None if choice is None else largest,
        steps=0 if choice is None else steps,
        rungs=tuple(rungs),
        seconds=sum(found.seconds for found in made.values()),
        sync=None if sharding is None else sharding.sync,
    )


def _check_sizes(batch_size: int, ranks: int, budget: int) -> None:
    for name, value in (("batch_size", batch_size), ("ranks", ranks), ("budget", budget)):
        if value < 1:
            raise OptionError(f"{name}={value}: must be at least 1")
    if batch_size < ranks:
        raise OptionError(
            f"batch_size={batch_size} on {ranks} ranks: must be at least one sample for each"
        )
