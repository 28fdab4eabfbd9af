"""A micro-step captured as a CUDA graph: one launch instead of thousands.

A CUDA graph holds addresses, so each micro-batch is copied into static tensors. Random numbers are
fresh at every replay: the device's generator is registered with the graph, and each replay advances
it. All graphs share one memory pool: they never run at the same time, and their outputs are copied
before the next replay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wholebatch.compile.fusion import collection_paused
from wholebatch.compile.graph_inputs import Inputs

Results: TypeAlias = tuple[list[Tensor], list[Tensor]]
Runnable: TypeAlias = Callable[[Inputs, Sequence[Tensor]], Results]


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture into `graph` what is launched within this context, by other threads too.

    With "thread_local", CUDA refuses calls that are unsafe during capture on this thread only. The
    garbage collector is paused: if it destroyed an older graph now, the new one would be broken.
    """
    with collection_paused(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield


class CapturedGraph:
    """`run` captured as a CUDA graph and replayed, on tensors like those given."""

    def __init__(
        self, run: Runnable, inputs: Inputs, seeds: Sequence[Tensor], *, pool: Any
    ) -> None:
        """Capture it. `run` must have run before, so that nothing is initialised during capture."""
        self._tensors = tuple(map(_like, inputs.tensors))
        self._seeds = [seed.clone() for seed in seeds]
        self._loaded: list[Tensor] = []
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, pool):
            self._totals, self._units = run(replace(inputs, tensors=self._tensors), self._seeds)

    @torch.no_grad()
    def __call__(self, inputs: Inputs, seeds: Sequence[Tensor]) -> Results:
        for static, tensor in zip(self._tensors, inputs.tensors, strict=True):
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
    """Run it once; before a CUDA graph capture, run it twice on a side stream."""
    if not captures:
        return run()
    current, side = torch.cuda.current_stream(device), _side(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(2):
            results = run()
    current.wait_stream(side)
    return results


def wait_for(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all: cuBLAS keeps a workspace per stream (32 MiB on an H200)."""
    return torch.cuda.Stream(device)


def _like(tensor: Tensor) -> Tensor:
    """Copy the tensor into new memory with the same strides. The copy keeps indices valid."""
    like = torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return like.copy_(tensor)
