"""A plan of how a model and a batch fit a device: peaks by size, the choice, and alternatives.

Everything here is predicted. It needs neither the device nor memory for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from wholebatch.core.splitting.samples import Static
from wholebatch.errors import OptionError
from wholebatch.memory.activation_checkpointing import (
    checkpointed,
    is_checkpointed,
    repeated_blocks,
)
from wholebatch.memory.choose_micro_batch import largest_fitting, spare
from wholebatch.memory.fsdp_sharding import Sharding, pretended_ranks
from wholebatch.memory.make_it_fit import Rung, ladder, lower_precisions
from wholebatch.memory.predict import Prediction, Predictor
from wholebatch.memory.resized_batches import resize_batch

__all__ = ["Plan", "Point", "Variant", "make_plan"]


_POINTS = 4
"""The number of sizes to predict: enough to show a line and its bend."""


@dataclass(frozen=True)
class Point:
    """The memory that one micro-batch size needs on every device."""

    micro_batch: int
    peak: int
    by_category: dict[str, int]
    fits: bool


@dataclass(frozen=True)
class Variant:
    """Another way to run the model: its peak at one size, and about the largest size that fits."""

    precision: str
    checkpointing: bool
    micro_batch: int
    peak: int
    about: int
    """The micro-batch that would fit, from a line through two predictions; 0 if none does."""
    gradients: str = "device"
    """The place of the gradients; only `"moments"` makes a different update."""
    sync: str | None = None
    """The time at which a sharded model reduces its gradients: "hold" or "every"."""


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
    variants: tuple[Variant, ...]
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


class _Peaks:
    """Cached predictions for one way of running."""

    def __init__(
        self,
        predict: Callable[[int], Prediction],
        device: torch.device,
        *,
        budget: int,
    ) -> None:
        self._predict = predict
        self._device = device
        self._budget = budget
        self.made: dict[int, Prediction] = {}

    def at(self, size: int) -> Prediction:
        if size not in self.made:
            self.made[size] = self._predict(size)
        return self.made[size]

    def need(self, size: int) -> int:
        found = self.at(size)
        return found.peak + spare(found, self._device)

    def point(self, size: int) -> Point:
        found = self.at(size)
        return Point(size, found.peak, found.by_category, self.need(size) <= self._budget)


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
    variants: bool = True,
    sync: Literal["hold", "every"] | None = None,
) -> Plan:
    """Plan updates of `batch_size` samples over `ranks` devices with `budget` bytes each.

    With `sync`, FSDP2 shards the model over them block by block: `"hold"` keeps whole gradients
    until the last micro-batch, `"every"` keeps slices. Otherwise each device holds the whole model.
    """
    for name, value in (("batch_size", batch_size), ("ranks", ranks), ("budget", budget)):
        if value < 1:
            raise OptionError(f"{name}={value}: must be at least 1")
    if batch_size < ranks:
        raise OptionError(
            f"batch_size={batch_size} on {ranks} ranks: must be at least one sample for each"
        )
    sharding = None if sync is None else Sharding(ranks, sync)
    predictor = Predictor(model, loss, optimizer=optimizer, device=device)
    target = predictor.device
    most = -(-batch_size // ranks)

    def peaks(
        precision: str, gradients: str = "device", sharding: Sharding | None = sharding
    ) -> _Peaks:
        def predict(size: int) -> Prediction:
            return predictor.peak(
                resize_batch(batch, size, static=static),
                precision=precision,
                micro_batches=1 if size == most else 2,
                gradients=gradients,
                # Data-parallel ranks all-reduce buckets of gradients during the last backward.
                reduction="overlap" if ranks > 1 and sharding is None else None,
                sharding=sharding,
            )

        return _Peaks(predict, target, budget=budget)

    # Use one group for all predictions, so that they can share copies of the model.
    with nullcontext() if sharding is None else pretended_ranks(ranks):
        here = peaks(precision)
        chosen = largest_fitting(here.need, budget=budget, most=most)
        fits = here.need(chosen) <= budget
        # For the plot, add a few powers of two, up to the first size that does not fit.
        beyond = min((size for size in here.made if here.need(size) > budget), default=most + 1)
        size = 1
        while size < beyond and len(here.made) < _POINTS:
            here.need(size)
            size *= 2
        steps = -(-most // chosen)
        even = -(-most // steps)
        if fits:
            here.need(even)
        shown = tuple(here.point(size) for size in _shown(here.made, even, chosen))
        others: list[Variant] = []
        if variants:
            others = _variants(
                model, peaks, here, precision, max(2, chosen), budget=budget, most=most
            )
            if sharding is not None:
                other: Literal["hold", "every"] = "every" if sync == "hold" else "hold"
                known = peaks(precision, sharding=Sharding(ranks, other))
                is_on, at = others[0].checkpointing, others[0].micro_batch
                row = _variant(known, precision, is_on, at, budget, most, like=here)
                others = [*(replace(one, sync=sync) for one in others), replace(row, sync=other)]
            elif optimizer is not None and target.type == "cuda":
                for gradients in _elsewhere(optimizer):
                    known = peaks(precision, gradients)
                    is_on = others[0].checkpointing
                    at = others[0].micro_batch
                    others.append(
                        _variant(known, precision, is_on, at, budget, most, gradients, here)
                    )
        rungs: Sequence[Rung] = ()
        if not fits:
            sample = resize_batch(batch, 1, static=static)
            rungs = ladder(
                model,
                loss,
                sample,
                budget=budget,
                optimizer=optimizer,
                precision=precision,
                device=target,
                sharding=sharding,
            )
        return Plan(
            batch_size=batch_size,
            ranks=ranks,
            budget=budget,
            precision=precision,
            points=shown,
            micro_batch=even if fits else None,
            largest=chosen if fits else None,
            steps=steps if fits else 0,
            variants=tuple(others),
            rungs=tuple(rungs),
            seconds=sum(found.seconds for found in here.made.values()),
            sync=sync,
        )


def _shown(made: dict[int, Prediction], even: int, largest: int) -> list[int]:
    """Return the sizes to show: powers of two, the choice, the largest, and the next above it."""
    beyond = min((size for size in made if size > largest), default=largest)
    return sorted(s for s in made if s & (s - 1) == 0 or s in (even, largest, beyond))


def _variants(
    model: torch.nn.Module,
    peaks: Callable[..., _Peaks],
    here: _Peaks,
    precision: str,
    size: int,
    *,
    budget: int,
    most: int,
) -> list[Variant]:
    blocks = repeated_blocks(model)
    is_on = any(is_checkpointed(module) for module in model.modules())
    found = []
    for again in (False, True):
        if again and (is_on or not blocks):
            continue
        around: AbstractContextManager[object] = checkpointed(model) if again else nullcontext()
        with around:
            for one in dict.fromkeys((precision, "full", *lower_precisions(model, "full"))):
                known = here if one == precision and not again else peaks(one)
                found.append(_variant(known, one, again or is_on, min(size, most), budget, most))
    return found


def _elsewhere(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the other ways to keep gradients; two need Adam's moments (AdamW is a subclass)."""
    adam = isinstance(optimizer, torch.optim.Adam)
    return ("host", "swap", "release", "moments") if adam else ("host", "release")


def _variant(
    known: _Peaks,
    precision: str,
    checkpointing: bool,
    at: int,
    budget: int,
    most: int,
    gradients: str = "device",
    like: _Peaks | None = None,
) -> Variant:
    """Build a variant from its peaks. `like` has the same slope and saves a prediction."""
    high = known.need(at)
    low = known.need(1) if like is None else high - like.need(at) + like.need(1)
    low = known.need(1) if low > budget else low  # Never report "nothing fits" from an estimate.
    slope = max(1.0, (high - low) / max(1, at - 1))
    about = 0 if low > budget else min(most, 1 + int((budget - low) / slope))
    return Variant(precision, checkpointing, at, known.at(at).peak, about, gradients)
