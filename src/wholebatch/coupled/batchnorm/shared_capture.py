"""A CUDA graph that several threads capture together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["CudaTape", "Tape"]

R = TypeVar("R")


class Tape(Protocol):
    """A recording of what `run` launches, which can be replayed."""

    def record(self, run: Callable[[], R], generators: Sequence[torch.Generator]) -> R: ...

    def replay(self) -> None: ...


class CudaTape:
    """A CUDA graph. Every replay overwrites the tensors that `run` returned."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def record(self, run: Callable[[], R], generators: Sequence[torch.Generator]) -> R:
        for generator in generators:
            self._graph.register_generator_state(generator)
        # Other threads launch into the captured stream too. With "thread_local", CUDA refuses
        # calls that are unsafe during capture on this thread only.
        try:
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                return run()
        except BaseException:
            _after_a_broken_recording(self._pool)
            raise

    def replay(self) -> None:
        self._graph.replay()


def _after_a_broken_recording(pool: Any) -> None:
    """Reset the allocator and the generator: a failed capture leaves them in capture mode."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError):
        torch.cuda.synchronize()
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device, pool)  # Raises if the capture did end.
        torch._C._cuda_releasePool(device, pool)
    with suppress(RuntimeError):
        blank = torch.cuda.CUDAGraph()
        number = torch.zeros(1, device="cuda")
        with torch.cuda.graph(blank, capture_error_mode="thread_local"):
            number.add_(1)
