"""A micro-step recorded as a CUDA graph: one launch instead of thousands.

The recording holds addresses, so a micro-batch is copied into tensors that stay. Random numbers
are fresh at every replay: the device's generator is part of the recording, and each replay moves
it on. Recordings share one pool of memory: they never run at the same time, and what they return
is copied out before the next one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from wholebatch.execute.joint import Results, Runnable

__all__ = ["Captured", "rehearse"]


class Captured:
    """`run` on tensors like those given, replayed."""

    def __init__(
        self,
        run: Runnable,
        tensors: Sequence[Tensor],
        seeds: Sequence[Tensor],
        *,
        pool: Any,
    ) -> None:
        """Record it. `run` must have run before, so that nothing is set up while recording."""
        self._tensors = [_like(tensor) for tensor in tensors]
        self._seeds = [seed.clone() for seed in seeds]
        self._loaded: list[Tensor] = []
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._totals, self._units = run(self._tensors, self._seeds)

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor], seeds: Sequence[Tensor]) -> Results:
        for static, tensor in zip(self._tensors, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        if len(self._loaded) != len(seeds) or any(map(operator.is_not, seeds, self._loaded)):
            for static, seed in zip(self._seeds, seeds, strict=True):
                static.copy_(seed, non_blocking=True)
            self._loaded = list(seeds)
        self._graph.replay()
        return [t.clone() for t in self._totals], [u.clone() for u in self._units]


def rehearse(
    run: Callable[[], list[Tensor]], device: torch.device, *, captures: bool
) -> list[Tensor]:
    """Run it once, or, where it is to be recorded, twice on a stream of its own."""
    if not captures:
        return run()
    current, side = torch.cuda.current_stream(device), _side(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(2):
            found = run()
    current.wait_stream(side)
    return found


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """One for all: cuBLAS keeps a workspace (32 MiB on an H200) for every stream it has seen."""
    return torch.cuda.Stream(device)


def _like(tensor: Tensor) -> Tensor:
    """Memory of the same shape and strides, with the same content (indices must be valid ones)."""
    like = torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return like.copy_(tensor)
