"""A window that ran out of memory begins again with smaller micro-batches, as if nothing had been.

A forward or backward that fails half way has added some gradients, moved BatchNorm's running
statistics and advanced the random generators; going on from there is wrong by half. So the window
starts over, with all of that put back and the micro-batch that failed cut in two. The result is
bit for bit that of a window which was split so from the start. One failure may be an accident (a
long sequence); from the second in a window on, all micro-batches of that size are cut at once.

Only the typed `torch.OutOfMemoryError` counts, never the text of a message. The update is not
inside: once parameters begin to change there is no way back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from wholebatch.core.forward_state import ForwardState
from wholebatch.core.precision import LossScale
from wholebatch.core.splitting import batch_size_of, split
from wholebatch.core.splitting.samples import Static
from wholebatch.errors import OptionError, SplitError
from wholebatch.memory.meter import MemoryMeter

__all__ = ["Recovered", "Recovery", "within"]

T = TypeVar("T")


@dataclass(frozen=True)
class Recovered:
    """One recovery: which micro-batch did not fit, and into what it was cut."""

    micro_batch: int
    """Its place in the window, from 0."""
    samples: int
    into: int
    """Samples of its larger half."""


class Recovery:
    """Runs windows so that running out of memory only makes their micro-batches smaller.

    `recovered` lists what happened, over all windows.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        scale: LossScale | None = None,
        static: Static = (),
        most: int = 64,
    ) -> None:
        if most < 0:
            raise OptionError(f"most={most}: must be 0 (never recover) or more recoveries a window")
        self.recovered: list[Recovered] = []
        self._model = model
        self._scale = scale
        self._static = static
        self._most = most
        # Copying Python's and NumPy's generators costs 0.1 ms, and few forwards draw from them.
        self._draws_on_host: bool | None = None

    def run(
        self,
        micros: Sequence[Any],
        attempt: Callable[[Sequence[Any], Callable[[int], None]], T],
        *,
        discard: Callable[[], None],
        relieved: Callable[[], bool] = lambda: False,
    ) -> tuple[T, list[Any]]:
        """What `attempt(micros, at)` returned, and the micro-batches that it went through with.

        `attempt` makes the forwards and backwards of a window and nothing after them; it calls
        `at(index)` before each micro-batch. `discard()` drops what a failed attempt has added.
        `relieved()` says whether it has given something up since, so that none need be cut.
        """
        before = ForwardState(self._model, every=self._draws_on_host is not False)
        scale = None if self._scale is None else self._scale.state_dict()
        parts = list(micros)
        for tried in range(self._most + 1):
            place = _Place()
            try:
                failure = _attempted(attempt, parts, place)
            except BaseException:
                with suppress(RuntimeError):  # of a device that has failed for good
                    before.restore()  # whatever it was, nothing of the window is left behind
                raise
            if isinstance(failure, _Done):
                if self._draws_on_host is None:
                    self._draws_on_host = not before.draws_same(ForwardState(), host=True)
                return failure.result, parts
            discard()
            before.restore()
            if self._scale is not None and scale is not None:
                self._scale.load_state_dict(scale)
            if not relieved():
                parts = self._smaller(parts, place.index, failure, all_alike=tried > 0)
            _release()
        raise torch.OutOfMemoryError(
            f"out of memory {self._most + 1} times in one window, the last time with"
            f" {len(parts)} micro-batches: something else is filling the memory; give a smaller"
            " micro-batch or a smaller memory= than what is free"
        )

    def _smaller(self, parts: list[Any], index: int, failure: str, *, all_alike: bool) -> list[Any]:
        """Cut the micro-batch that failed in two, and with it `all_alike` that are as large."""
        samples = batch_size_of(parts[index], static=self._static)
        if samples == 1:
            raise torch.OutOfMemoryError(
                f"micro-batch {index + 1} of {len(parts)} has one sample and does not fit"
                f" ({failure}); what would make it fit: precision='bf16', activation checkpointing"
                " (wholebatch.memory.with_checkpoints), shorter samples, or a sharded model"
            )
        half = -(-samples // 2)
        self.recovered.append(Recovered(index, samples, half))
        smaller: list[Any] = []
        for place, part in enumerate(parts):
            cut = place == index or (all_alike and self._has(part, samples))
            smaller += split(part, half, static=self._static) if cut else [part]
        return smaller

    def _has(self, part: Any, samples: int) -> bool:
        """True for a micro-batch of at least so many samples, as far as that can be told."""
        try:
            return batch_size_of(part, static=self._static) >= samples
        except SplitError:
            return False


def within(
    budget: int | None,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> AbstractContextManager[object]:
    """A budget in force: on the CPU by counting, on CUDA by the allocator's own limit.

    More than `budget` bytes of tensors raise `torch.OutOfMemoryError`, as a device of that size
    would. On CUDA the limit is of the process, and stays.
    """
    if budget is None:
        return nullcontext()
    device = next(model.parameters()).device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
        return nullcontext()
    return MemoryMeter(model=model, optimizer=optimizer, limit=budget)


class _Place:
    """How far an attempt came."""

    def __init__(self) -> None:
        self.index = 0

    def __call__(self, index: int) -> None:
        self.index = index


@dataclass(frozen=True)
class _Done:
    result: Any


def _attempted(
    attempt: Callable[[Sequence[Any], Callable[[int], None]], Any], parts: list[Any], place: _Place
) -> _Done | str:
    try:
        return _Done(attempt(parts, place))
    except torch.OutOfMemoryError as error:
        # Only its text leaves here: the traceback holds every frame of the attempt, and those
        # hold the tensors that must be gone before the next one.
        return str(error).split("\n")[0]


def _release() -> None:
    gc.collect()  # a failed backward leaves cycles between graph and hooks
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
