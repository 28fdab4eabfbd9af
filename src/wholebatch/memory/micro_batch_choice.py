"""The micro-batch that "auto" takes: the largest of which a real step fits the device.

On a CPU, where nothing refuses memory, the batch is not split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from wholebatch.batch import batch_size_of
from wholebatch.distributed import Sync
from wholebatch.errors import OptionError, RankError
from wholebatch.memory.budget import Budget, limit_allocator, parse_memory
from wholebatch.memory.choose_micro_batch import choose_micro_batch, resize_batch
from wholebatch.memory.predict import state_bytes
from wholebatch.memory.trial_step import held_bytes, trial_peak
from wholebatch.readable_sizes import bytes_said

_log = logging.getLogger("wholebatch")


@dataclass(eq=False)
class MicroBatchChoice:
    """Chooses by a model, its loss and a budget; all ranks take the smallest choice."""

    model: nn.Module
    loss: Callable[[Any, Any], Any]
    optimizer: torch.optim.Optimizer
    memory: Budget | None
    precision: str
    layout: dict[str, Any]
    sync: Sync
    state_on_device: bool
    said: str | None = None
    """The choice and its reason, in two lines; None before it was made."""

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.budget = None if self.memory is None else self._bytes(self.memory)
        if self.budget is not None and self.device.type == "cpu":
            _log.warning(
                "memory=%r changes nothing: the model is on a CPU, where nothing refuses memory; "
                "give micro_batch= as a number (wholebatch plan predicts what it takes)",
                self.memory,
            )

    def _bytes(self, memory: Budget) -> int:
        held = held_bytes(self.model, self.optimizer)
        return parse_memory(memory, device=self.device, held=held)

    def __call__(self, batches: Sequence[Any]) -> int:
        """Return how many samples a micro-batch may have, by the largest of these batches."""
        largest = max(batches, key=lambda batch: batch_size_of(batch, **self.layout))
        samples = batch_size_of(largest, **self.layout)
        problem: Exception | None = None
        chosen = 0
        try:
            chosen = self._choose(largest, samples)
        except Exception as error:
            problem = error
        chosen = int(self.smallest(chosen))  # All ranks split alike, or all end if one cannot.
        if problem is not None:
            raise problem
        if chosen == 0:
            raise RankError(
                "another rank found no micro-batch that fits its memory; see its message"
            )
        return min(chosen, samples)

    def join(self) -> int | None:
        """Take part in the other ranks' choice, without a batch."""
        return int(self.smallest(math.inf)) or None

    def smallest(self, number: float) -> float:
        """Return the smallest number of all ranks."""
        return -self.sync.group.largest_number(-number)

    def _choose(self, batch: Any, samples: int) -> int:
        """Return the largest size of which a step fits, measured by steps that are undone."""
        if self.device.type != "cuda":
            return samples
        limit_allocator(self.budget, self.device)  # from here on, for the trial steps too
        budget = self.budget or self._bytes("free")
        static, missing = self.layout["static"], self._missing_state()

        def peak(size: int) -> int | None:
            # From the second micro-batch on there are gradients beside the activations. The
            # smaller last one leaves the freed memory in other pieces.
            micro = resize_batch(batch, size, static=static)
            last = resize_batch(batch, samples % size or size, static=static)
            return trial_peak(
                self.model,
                self.loss,
                [micro, micro, last],
                optimizer=self.optimizer if self.state_on_device else None,
                precision=self.precision,
                budget=budget,
                missing_state=missing,
            )

        choice = choose_micro_batch(peak, budget=budget, most=samples)
        if choice is None:
            raise OptionError(
                f"memory={bytes_said(budget)}: a micro-batch of one sample does not fit; "
                f"{self.ways}"
            )
        self.said = choice.summary()
        _log.info("%s", self.said)
        return choice.micro_batch

    @property
    def ways(self) -> str:
        """What makes a micro-batch of one sample smaller."""
        is_sharded = any(isinstance(p, DTensor) for p in self.model.parameters())
        sharding = "more devices" if is_sharded else "a sharded model"
        return (
            'use precision="bf16", checkpointing (wholebatch.memory.with_checkpoints), on a GPU '
            'also wb.Memory(optimizer_state="host"), shorter samples, a larger device or '
            f"{sharding}; wholebatch plan tells what each of them takes"
        )

    def _missing_state(self) -> int:
        """Return the bytes of optimizer state that the first update will create on the device."""
        if not self.state_on_device:
            return 0
        there = held_bytes(self.model, self.optimizer) - held_bytes(self.model)
        try:
            return max(0, state_bytes(self.model, self.optimizer) - there)
        except Exception:  # An optimizer may do anything. Most have at most two moments.
            weights = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
            return max(0, 2 * weights - there)
