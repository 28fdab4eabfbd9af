"""The ranks of a run under torchrun: the device, the process group, and what ranks agree on.

One process is a world of one: every method then does the plain thing, without a collective.
"""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.distributed.process_group import largest_over_ranks, shorten_timeout, world_size
from wholebatch.errors import RankError, WholebatchError

T = TypeVar("T")

_LEAST_TIMEOUT = 300.0
_TIMES_FIRST_WINDOW = 20.0


class World:
    """The processes that train together, seen from one of them."""

    def __init__(self, rank: int, *, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.ranks = world_size()
        self.is_first = rank == 0

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank."""
        return bool(largest_over_ranks(float(flag)))

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks: plain values and tensors, as in a checkpoint."""
        if self.ranks == 1:
            return [value]
        sent = io.BytesIO()
        torch.save(value, sent)
        received: list[Any] = [None] * self.ranks
        dist.all_gather_object(received, sent.getvalue())
        return [torch.load(io.BytesIO(part), weights_only=True) for part in received]

    def on_first_rank(self, function: Callable[[], T]) -> T:
        """Run the function on the first rank, and return its result on all ranks."""
        result: list[Any] = [None]
        if self.is_first:
            result = [self.together(function)]
        else:
            self.together(lambda: None)
        if self.ranks > 1:
            dist.broadcast_object_list(result, src=0)
        answer: T = result[0]
        return answer

    def together(self, function: Callable[[], T]) -> T:
        """Run the function on every rank; an error of one ends all, and is printed once."""
        if self.ranks == 1:
            return function()
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        failed = [rank for rank, has in enumerate(self.gathered(error is not None)) if has]
        if failed and (error is None or self.rank != failed[0]):
            raise SystemExit(2)
        if error is not None:
            if self.rank and isinstance(error, WholebatchError):
                raise RankError(f"rank {self.rank}: {error}") from error
            raise error
        return result  # type: ignore[return-value]

    def first_window_made(self, seconds: float) -> None:
        """Let a rank that hangs from now on end the job; the first window took so many seconds."""
        if self.ranks > 1:
            shorten_timeout(max(_LEAST_TIMEOUT, _TIMES_FIRST_WINDOW * seconds))


def copied(model: nn.Module) -> nn.Module:
    """Return the model under DDP, a copy on each rank; in one process, the model itself."""
    device = next(model.parameters()).device
    if world_size() == 1:
        return model
    return DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None
    )


@contextmanager
def process_group() -> Iterator[tuple[int, torch.device]]:
    """Join the ranks of torchrun; give this process's rank and device: CUDA where there is one."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0, where
        return
    if where.type == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    begins = not dist.is_initialized()
    if begins:
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    try:
        yield dist.get_rank(), where
    finally:
        if begins and dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()  # models still hold the group, whose threads end with it
