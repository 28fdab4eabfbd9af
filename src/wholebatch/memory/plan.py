"""A plan of how a model and a batch fit a device: peaks by size, the choice, and alternatives.

Everything here is predicted. It needs neither the device nor memory for the model. For a model that
does not fit, the plan answers how many GPUs of which kind, sharded how, would do: one sample per
micro-batch is simulated with checkpointed blocks on 8 ranks and on 64. The peak is convex in
1 / ranks, so between the two a line is never too low.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from wholebatch.batch.samples import Static
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.memory.activation_checkpointing import (
    checkpointed,
    is_checkpointed,
    repeated_blocks,
)
from wholebatch.memory.choose_micro_batch import PeaksBySize, largest_fitting, needed, resize_batch
from wholebatch.memory.fsdp_sharding import Sharding, pretended_ranks
from wholebatch.memory.make_it_fit import Rung, ladder, lower_precisions
from wholebatch.memory.predict import Prediction, Predictor
from wholebatch.memory.zero_stages import host_bytes

_FEW, _MANY = 8, 64
"""The numbers of ranks that are simulated; more than the second are not proposed."""
_MOST_BLOCKS = 100_000


@dataclass(frozen=True)
class Hardware:
    """A number of GPUs of one kind on which one sample per micro-batch fits."""

    gpu: str
    memory: int
    gpus: int
    sharding: str
    precision: str
    checkpointing: bool
    offload: bool
    peak: int
    """The bytes that a GPU must have."""
    host: int
    """The bytes of host memory that all ranks together fill; 0 without offload."""
    price: float | None = None
    """The price of all these GPUs for an hour, if that of one is known."""


@dataclass(frozen=True)
class LargestModel:
    """The deepest model with blocks like these that fits on the given GPUs."""

    how: str
    blocks: int
    parameters: int


@dataclass(frozen=True)
class Answer:
    """The hardware that would do, without offload first, and the largest models that fit here."""

    hardware: tuple[Hardware, ...] = ()
    largest: tuple[LargestModel, ...] = ()


def answer(
    predictor: Predictor,
    model: torch.nn.Module,
    sample: Any,
    *,
    precision: str,
    budget: int,
    ranks: int,
    kinds: Mapping[str, int],
    prices: Mapping[str, float],
) -> Answer:
    """Return what would fit a model of which one sample does not fit on `ranks` GPUs.

    `kinds` are the bytes of other GPUs by name, `prices` those of a GPU for an hour; "here" is the
    one with `budget` bytes.
    """
    is_on = any(is_checkpointed(module) for module in model.modules())
    can = is_on or bool(repeated_blocks(model))
    around = checkpointed(model) if can and not is_on else nullcontext()
    with around:
        sharded = _Sharded(predictor, sample, precision)
        found = [
            one
            for name, memory in {"here": budget, **kinds}.items()
            for offload in (False, True)
            if (one := sharded.hardware(name, memory, offload, prices, can)) is not None
        ]
        largest = [] if predictor.alike_blocks() is None else sharded.largest(budget, max(2, ranks))
    best = [one for one in found if not any(_is_better(other, one) for other in found)]
    best.sort(key=lambda one: (one.offload, one.gpus * one.memory))
    return Answer(tuple(best), tuple(largest))


def _is_better(one: Hardware, than: Hardware) -> bool:
    """True if these GPUs are as few and as small, and cost no more."""
    if one is than or one.offload != than.offload:
        return False
    is_cheap = than.price is None or (one.price is not None and one.price <= than.price)
    return one.gpus <= than.gpus and one.memory < than.memory and is_cheap


@dataclass(eq=False)
class _Sharded:
    """Predictions for a model sharded by FSDP2, over numbers of ranks."""

    predictor: Predictor
    sample: Any
    precision: str

    def __post_init__(self) -> None:
        self._ends: dict[tuple[int, bool, int | None], int] = {}

    def _end(self, ranks: int, offload: bool, depth: int | None = None) -> int:
        key = ranks, offload, depth
        if key not in self._ends:
            with pretended_ranks(ranks):
                found: Prediction = self.predictor.peak(
                    self.sample,
                    depth=depth,
                    precision=self.precision,
                    sharding=Sharding(ranks, "every", offload=offload),
                )
            self._ends[key] = needed(found, self.predictor.device)
        return self._ends[key]

    def need(self, ranks: int, offload: bool) -> int:
        """Return the bytes that a device must have."""
        few, many = (self._end(count, offload) for count in (_FEW, _MANY))
        share = (1 / ranks - 1 / _MANY) / (1 / _FEW - 1 / _MANY)
        return int(many + share * (few - many))

    def hardware(
        self, gpu: str, memory: int, offload: bool, prices: Mapping[str, float], checkpoints: bool
    ) -> Hardware | None:
        """Return the fewest GPUs of a kind, in whole machines of 8, that would do."""
        gpus = next((n for n in (8, 16, 24, 32, 48, 64) if self.need(n, offload) <= memory), None)
        if gpus is None:
            return None
        sharding = Sharding(gpus, "every", offload=offload)
        elements = self.predictor.elements()
        price = prices.get(gpu)
        return Hardware(
            gpu,
            memory,
            gpus,
            sharding.said(),
            self.precision,
            checkpoints,
            offload,
            self.need(gpus, offload),
            host_bytes(sharding, elements, 4),
            None if price is None else gpus * price,
        )

    def largest(self, budget: int, ranks: int) -> list[LargestModel]:
        """Return the deepest models that fit on this many ranks."""
        found = []
        for offload in (False, True):
            how = Sharding(ranks, "every", offload=offload).said() + ", checkpointed"
            need = partial(self._end, ranks, offload)
            blocks = largest_fitting(need, budget=budget, most=_MOST_BLOCKS)
            if need(blocks) <= budget:
                found.append(LargestModel(how, blocks, self.predictor.elements(blocks)))
        return found


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
    optimizer_state: str = "device"
    """Where the optimizer's state is between steps."""
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
    answer: Answer = field(default_factory=Answer)
    """The hardware that would do if nothing fits, and the largest models that fit here."""
    price: float | None = None
    """The price of the GPUs for an hour, if that of one is given."""

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


@dataclass
class _Way(PeaksBySize):
    """One way of running, and the bytes of the device that it must fit."""

    budget: int = 0

    def other(self, **how: Any) -> _Way:
        """Return the same model and batch in another way."""
        return replace(self, how={**self.how, **how}, made={})

    def fits(self, size: int) -> bool:
        return self.need(size) <= self.budget

    def point(self, size: int) -> Point:
        found = self.at(size)
        return Point(size, found.peak, found.by_category, self.fits(size))

    def variant(self, size: int, *, checkpointing: bool, like: _Way | None = None) -> Variant:
        """Return this way of running; `like` has the same slope and saves a prediction."""
        size, budget = min(size, self.most), self.budget
        high = self.need(size)
        low = self.need(1) if like is None else high - like.need(size) + like.need(1)
        if low > budget:  # Never report "nothing fits" from an estimate.
            low = self.need(1)
        elif size == 1 < self.most:
            return replace(self.variant(2, checkpointing=checkpointing), micro_batch=1, peak=high)
        slope = max(1.0, (high - low) / max(1, size - 1))
        about = 0 if low > budget else min(self.most, 1 + int((budget - low) / slope))
        peak, how = self.at(size).peak, self.how
        return Variant(how["precision"], checkpointing, size, peak, about, how["optimizer_state"])


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
    sharding: Sharding | None = None,
    kinds: Mapping[str, int] | None = None,
    prices: Mapping[str, float] | None = None,
) -> Plan:
    """Plan updates of `batch_size` samples over `ranks` devices with `budget` bytes each.

    `sharding` spreads the model over them: by FSDP2 block by block, or by a stage of DeepSpeed's
    ZeRO. Otherwise each device holds the whole model. `kinds` are the bytes of other GPUs by name,
    to answer what would do; `prices` are those of a GPU for an hour, "here" that of a planned one.
    """
    _check_sizes(batch_size, ranks, budget)
    predictor = Predictor(model, loss, optimizer=optimizer, device=device)
    most = -(-batch_size // ranks)
    sample = resize_batch(batch, 1, static=static)
    how: dict[str, Any] = {
        "precision": precision,
        "optimizer_state": "device",
        "sharding": sharding,
    }
    # Data-parallel ranks all-reduce buckets of gradients during the last backward.
    how["reduction"] = "overlap" if ranks > 1 and sharding is None else None
    here = _Way(predictor, batch, most, static, how, budget=budget)
    # Use one group for all predictions, so that they can share copies of the model.
    shards = sharding is not None and sharding.shards_parameters
    with pretended_ranks(ranks) if shards else nullcontext():
        largest = largest_fitting(here.need, budget=budget, most=most)
        fits = here.fits(largest)
        steps = -(-most // largest)
        even = -(-most // steps)
        points = _points(here, even, largest, most)
        at = max(2, largest) if fits else 1
        others = _variants(model, here, at, optimizer) if variants else []
        rungs: list[Rung] = []
        if not fits:
            rungs = ladder(
                model,
                loss,
                sample,
                budget=budget,
                optimizer=optimizer,
                precision=precision,
                device=predictor.device,
                sharding=sharding,
                predictor=predictor,
            )
    found = Answer()
    if not fits and predictor.device.type == "cuda":
        with suppress(UnsupportedError):  # FSDP2 takes no 16-bit parameters.
            found = answer(
                predictor,
                model,
                sample,
                precision=next(iter(lower_precisions(model, precision)), precision),
                budget=budget,
                ranks=ranks,
                kinds=kinds or {},
                prices=prices or {},
            )
    price = (prices or {}).get("here")
    return Plan(
        batch_size=batch_size,
        ranks=ranks,
        budget=budget,
        precision=precision,
        points=points,
        micro_batch=even if fits else None,
        largest=largest if fits else None,
        steps=steps if fits else 0,
        variants=tuple(others),
        rungs=tuple(rungs),
        seconds=sum(found.seconds for found in here.made.values()),
        sync=None if sharding is None else sharding.sync,
        answer=found,
        price=None if price is None else ranks * price,
    )


def _check_sizes(batch_size: int, ranks: int, budget: int) -> None:
    for name, value in (("batch_size", batch_size), ("ranks", ranks), ("budget", budget)):
        if value < 1:
            raise OptionError(f"{name}={value}: must be at least 1")
    if batch_size < ranks:
        raise OptionError(
            f"batch_size={batch_size} on {ranks} ranks: must be at least one sample for each"
        )


def _points(here: _Way, even: int, largest: int, most: int) -> tuple[Point, ...]:
    """Return the sizes to show: powers of two, the choice, the largest, and the next above it."""
    # Add a few powers of two, up to the first size that does not fit.
    beyond = min((size for size in here.made if not here.fits(size)), default=most + 1)
    size = 1
    while size < beyond and len(here.made) < _POINTS:
        here.at(size)
        size *= 2
    if here.fits(largest):
        here.at(even)
    above = min((size for size in here.made if size > largest), default=largest)
    shown = sorted(s for s in here.made if s & (s - 1) == 0 or s in (even, largest, above))
    return tuple(here.point(size) for size in shown)


def _variants(
    model: torch.nn.Module, here: _Way, size: int, optimizer: torch.optim.Optimizer | None
) -> list[Variant]:
    """Return other ways to run: precisions, checkpointing, and optimizer state on the host."""
    precision, sharding = here.how["precision"], here.how["sharding"]
    is_on = any(is_checkpointed(module) for module in model.modules())
    precisions = dict.fromkeys((precision, "full", *lower_precisions(model, "full")))
    found = [
        (here if one == precision else here.other(precision=one)).variant(size, checkpointing=is_on)
        for one in precisions
    ]
    if not is_on and repeated_blocks(model):
        with checkpointed(model):
            again = [here.other(precision=one) for one in precisions]
            found += [way.variant(size, checkpointing=True) for way in again]
    if sharding is not None:
        found = [replace(one, sync=_way(sharding)) for one in found]
        for other in _other_ways(sharding):
            row = here.other(sharding=other).variant(size, checkpointing=is_on)
            found.append(replace(row, sync=_way(other)))
        return found
    if optimizer is not None and here.predictor.device.type == "cuda":
        way = here.other(optimizer_state="host")
        found.append(way.variant(size, checkpointing=is_on, like=here))
    return found


def _other_ways(sharding: Sharding) -> list[Sharding]:
    """Return the same engine with another time to reduce, stage, or place of the state."""
    if sharding.zero:
        stages: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
        ways = [replace(sharding, zero=stage) for stage in stages]
        # Stages that shard parameters run in a process group, which only a plan of theirs has.
        ways = [one for one in ways if one.shards_parameters <= sharding.shards_parameters]
    else:
        ways = [replace(sharding, sync="hold"), replace(sharding, sync="every")]
    ways += [replace(one, offload=True) for one in ways if one.zero or one.sync == "every"]
    return [one for one in ways if one != sharding]


def _way(sharding: Sharding) -> str:
    """Return the row's name: when FSDP2 reduces, or ZeRO's stage, and the place of the state."""
    name = f"ZeRO {sharding.zero}" if sharding.zero else sharding.sync
    return f"{name}, offload" if sharding.offload else name
