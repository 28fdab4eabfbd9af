"""Restart a window that ran out of memory with smaller micro-batches, from the same state.

A forward or backward that fails half way has added some gradients, changed BatchNorm's running
statistics and advanced the random generators. Continuing from there would be wrong. So all of this
is restored, the batch is split into smaller micro-batches, and the window starts again. The result
is bit for bit that of a window with this split from the start.

Only the typed `torch.OutOfMemoryError` counts, never the text of a message. The optimizer step is
not retried: once parameters change, the old state is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wholebatch.memory.meter import free_caches
from wholebatch.window.forward_state import ForwardState
from wholebatch.window.precision import LossScale

_MOST = 64
"""Attempts at one window: each has smaller micro-batches, or a setting that needs less memory."""


class Attempt:
    """One attempt at a window: running out of memory ends it, and nothing else.

    Any other error leaves as it came, after buffers and random state are put back. Without the
    state `before` it, it is the only attempt, and running out of memory leaves as well.
    """

    def __init__(
        self,
        micros: Sequence[Any],
        before: ForwardState | None = None,
        inside: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.micros = micros
        self.before = before
        """The state before it; None if it cannot begin again."""
        self.failure: str | None = None
        """The first line of the error that ended it. The error itself is not kept: its traceback
        holds every frame of the attempt, and those hold the tensors that must be gone."""
        self._inside = inside

    def __enter__(self) -> Attempt:
        if self._inside is not None:
            self._inside.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if self._inside is not None:
            self._inside.__exit__(kind, error, traceback)
        if error is None or self.before is None:
            return False
        if isinstance(error, torch.OutOfMemoryError):
            self.failure = str(error).split("\n")[0]
            return True
        with suppress(RuntimeError):  # of a device that has failed for good
            self.before.restore()  # nothing of the window is left behind
        return False


@dataclass(eq=False)
class Recovery:
    """Runs windows so that running out of memory only begins them again."""

    model: nn.Module
    scale: LossScale | None = None

    def __post_init__(self) -> None:
        # Copying Python's and NumPy's generators costs 0.1 ms, and few forwards draw from them.
        self._draws_on_host: bool | None = None

    def attempts(
        self,
        micros: Sequence[Any],
        *,
        discard: Callable[[], None],
        smaller: Callable[[Attempt], Sequence[Any]],
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Iterator[Attempt]:
        """Yield attempts at a window until one goes through without running out of memory.

        `with attempt:` makes the forwards and backwards of `attempt.micros` and nothing after them,
        within `inside()`. `discard()` drops what a failed attempt has added. `smaller(attempt)`
        returns the micro-batches of the next one, or raises where nothing can be saved.
        """
        every = self._draws_on_host is not False
        before = ForwardState(self.model, every=every)
        scale = None if self.scale is None else self.scale.state_dict()
        for _ in range(_MOST):
            attempt = Attempt(micros, before, inside())
            yield attempt
            if attempt.failure is None:
                if self._draws_on_host is None:
                    self._draws_on_host = not before.draws_same(ForwardState(), host=True)
                return
            discard()
            before.restore()
            if self.scale is not None and scale is not None:
                self.scale.load_state_dict(scale)
            free_caches()  # a failed backward leaves cycles between graph and hooks
            micros = smaller(attempt)
        raise torch.OutOfMemoryError(
            f"out of memory {_MOST} times in one window, the last time with {len(micros)} "
            "micro-batches: something else is filling the memory; give a smaller micro-batch or a "
            "smaller memory= than what is free"
        )


def limit_allocator(budget: int | None, device: torch.device) -> None:
    """Let CUDA's allocator refuse more than a budget, for this process, from now on.

    Nothing refuses memory on a CPU: there a budget decides the size of a micro-batch alone.
    """
    if budget is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
