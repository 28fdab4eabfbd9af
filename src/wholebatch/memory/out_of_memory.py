"""Restart a window that ran out of memory with smaller micro-batches, from the same state.

A forward or backward that fails half way has added some gradients, changed BatchNorm's running
statistics and advanced the random generators. Continuing from there would be wrong. So all of this
is restored, the failed micro-batch is cut in two, and the window starts again. The result is bit
for bit that of a window with this split from the start. One failure may be an accident (a long
sequence); from the second in a window on, all micro-batches of that size are cut at once.

Only the typed `torch.OutOfMemoryError` counts, never the text of a message. The optimizer step is
not retried: once parameters change, the old state is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from wholebatch.batch import batch_size_of, split
from wholebatch.batch.samples import Static
from wholebatch.errors import OptionError, SplitError
from wholebatch.memory.meter import MemoryMeter, free_caches
from wholebatch.window.forward_state import ForwardState, capture_random
from wholebatch.window.precision import LossScale


@dataclass(frozen=True)
class Recovered:
    """One recovery: which micro-batch did not fit, and into what it was cut."""

    micro_batch: int
    """Its place in the window, from 0."""
    samples: int
    into: int
    """Samples of its larger half."""


class Attempt:
    """One attempt at a window: running out of memory ends it, and nothing else.

    Any other error leaves as it came, after buffers and random state are put back. Without the
    state `before` it, it is the only attempt, and running out of memory leaves as well.
    """

    def __init__(
        self,
        micros: list[Any],
        before: ForwardState | None = None,
        inside: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.micros = micros
        self.random = capture_random(every=False) if before is None else before.random
        """The random generators before it."""
        self.place = 0
        """The micro-batch that runs now, from 0."""
        self.failure: str | None = None
        """The first line of the error that ended it. The error itself is not kept: its traceback
        holds every frame of the attempt, and those hold the tensors that must be gone."""
        self._before = before
        self._inside = inside

    def __enter__(self) -> Attempt:
        if self._inside is not None:
            self._inside.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if self._inside is not None:
            self._inside.__exit__(kind, error, traceback)
        if error is None or self._before is None:
            return False
        if isinstance(error, torch.OutOfMemoryError):
            self.failure = str(error).split("\n")[0]
            return True
        with suppress(RuntimeError):  # of a device that has failed for good
            self._before.restore()  # nothing of the window is left behind
        return False


@dataclass(eq=False)
class Recovery:
    """Runs windows so that running out of memory only makes their micro-batches smaller.

    `recovered` lists what happened, over all windows.
    """

    model: nn.Module
    scale: LossScale | None = None
    static: Static = ()
    most: int = 64
    recovered: list[Recovered] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.most < 0:
            raise OptionError(
                f"most={self.most}: must be 0 (never recover) or more recoveries a window"
            )
        # Copying Python's and NumPy's generators costs 0.1 ms, and few forwards draw from them.
        self._draws_on_host: bool | None = None

    def attempts(
        self,
        micros: Sequence[Any],
        *,
        discard: Callable[[], None],
        relieved: Callable[[str], bool] = lambda failure: False,
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Iterator[Attempt]:
        """Yield attempts at a window until one goes through without running out of memory.

        `with attempt:` makes the forwards and backwards of `attempt.micros` and nothing after them,
        within `inside()`. `discard()` drops what a failed attempt has added. `relieved(failure)`
        returns True if it has saved memory in another way, so that no micro-batch need be cut.
        """
        before = ForwardState(self.model, every=self._draws_on_host is not False)
        scale = None if self.scale is None else self.scale.state_dict()
        parts = list(micros)
        for tried in range(self.most + 1):
            attempt = Attempt(parts, before, inside())
            yield attempt
            if attempt.failure is None:
                if self._draws_on_host is None:
                    self._draws_on_host = not before.draws_same(ForwardState(), host=True)
                return
            discard()
            before.restore()
            if self.scale is not None and scale is not None:
                self.scale.load_state_dict(scale)
            if not relieved(attempt.failure):
                parts = self._smaller(parts, attempt.place, attempt.failure, all_alike=tried > 0)
            free_caches()  # a failed backward leaves cycles between graph and hooks
        raise torch.OutOfMemoryError(
            f"out of memory {self.most + 1} times in one window, the last time with"
            f" {len(parts)} micro-batches: something else is filling the memory; give a smaller"
            " micro-batch or a smaller memory= than what is free"
        )

    def _smaller(self, parts: list[Any], index: int, failure: str, *, all_alike: bool) -> list[Any]:
        """Cut the micro-batch that failed in two, and with it `all_alike` that are as large."""
        samples = batch_size_of(parts[index], static=self.static)
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
            smaller += split(part, half, static=self.static) if cut else [part]
        return smaller

    def _has(self, part: Any, samples: int) -> bool:
        """True for a micro-batch of at least so many samples, as far as that can be told."""
        try:
            return batch_size_of(part, static=self.static) >= samples
        except SplitError:
            return False


def within(
    budget: int | None, *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
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
