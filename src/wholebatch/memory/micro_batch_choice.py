"""What fits a device: the micro-batch that "auto" takes, the setting of an undivided batch.

On CUDA real steps run, and their effects are undone. On a CPU, where nothing would refuse memory,
the steps are predicted, and only if a budget was given.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from wholebatch.batch import batch_size_of
from wholebatch.distributed import Sync
from wholebatch.errors import OptionError, RankError, UnsupportedError
from wholebatch.memory.budget import Budget, parse_memory, sharing_processes
from wholebatch.memory.choose_micro_batch import choose_micro_batch, resize_batch
from wholebatch.memory.out_of_memory import limit_allocator
from wholebatch.memory.predict import simulating, state_bytes
from wholebatch.memory.trial_step import held_bytes, measure_step, trial_peak
from wholebatch.memory.undivided_batch import UndividedBatch
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

    def _bytes(self, memory: Budget) -> int:
        return parse_memory(
            memory,
            device=self.device,
            held=held_bytes(self.model, self.optimizer),
            processes=sharing_processes(self.device, self.sync.ranks),
        )

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
        """Return the largest size of which a step fits."""
        on_cuda = self.device.type == "cuda"
        if self.budget is None and not on_cuda:
            return samples
        budget = self.budget or self._bytes("free")
        with self._measured(batch, samples, budget) if on_cuda else self._predicted(batch) as peak:
            choice = choose_micro_batch(peak, budget=budget, most=samples)
        if choice is None:
            raise OptionError(
                f"memory={bytes_said(budget)}: a micro-batch of one sample does not fit; "
                f"{self.ways}"
            )
        self.said = choice.summary(measured=on_cuda)
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

    @contextmanager
    def _predicted(self, batch: Any) -> Iterator[Callable[[int], int | None]]:
        """Yield a function that predicts the peak of a size."""
        with simulating(self.model, self.loss, optimizer=self.optimizer) as simulation:

            def peak(size: int) -> int:
                micro = resize_batch(batch, size, static=self.layout["static"])
                return simulation.predict(micro, precision=self.precision).peak

            yield peak

    @contextmanager
    def _measured(
        self, batch: Any, samples: int, budget: int
    ) -> Iterator[Callable[[int], int | None]]:
        """Yield a function that measures the peak of a size, by steps whose effects are undone."""
        limit_allocator(self.budget, self.device)  # from here on, for the trial steps too
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

        yield peak

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

    # ------------------------------------------------------- a batch that must not be split

    def find_setting(self, undivided: UndividedBatch, whole: Any) -> None:
        """Find the first setting in which the batch fits, on all ranks."""
        on_cpu = self.device.type == "cpu"
        # On CUDA one rank alone begins its window again in the next setting, when it must.
        if self.budget is None if on_cpu else self.sync.ranks == 1:
            return
        limit_allocator(self.budget, self.device)
        while True:
            failure = self._failure_of(undivided, whole)
            if failure is None or undivided.place + 1 == len(undivided.settings):
                break
            undivided.save_memory(failure)
        undivided.place = int(self.sync.group.largest_number(undivided.place))
        if self.sync.group.sum([float(failure is not None)])[0]:
            undivided.place = len(undivided.settings) - 1
            undivided.save_memory(failure or "on another rank")

    def _failure_of(self, undivided: UndividedBatch, whole: Any) -> str | None:
        """Return why a step in the present setting does not fit; None if it does."""
        if self.device.type == "cpu":
            how: dict[str, Any] = {"precision": self.precision, "micro_batches": 1}
            try:
                with simulating(self.model, self.loss, optimizer=self.optimizer) as simulation:
                    peak = simulation.predict(whole, checkpoints=undivided.place > 0, **how).peak
            except UnsupportedError:  # the loss reads values: the batch runs as it is
                return None
            budget = self.budget or 0
            return None if peak <= budget else f"{bytes_said(peak)} of {bytes_said(budget)}"
        try:
            with undivided.running():
                measure_step(self.model, self.loss, [whole], precision=self.precision)
        except torch.OutOfMemoryError as error:
            return str(error).split("\n")[0]
        return None
