"""An answer for a model that does not fit: how many GPUs of which kind, sharded how, would do.

One sample per micro-batch is simulated with checkpointed blocks on 8 ranks and on 64.
The peak is convex in 1 / ranks, so between the two a line is never too low.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from wholebatch.memory.activation_checkpointing import (
    checkpointed,
    is_checkpointed,
    repeated_blocks,
)
from wholebatch.memory.choose_micro_batch import largest_fitting, needed
from wholebatch.memory.fsdp_sharding import Sharding, pretended_ranks
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
