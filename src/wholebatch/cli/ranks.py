"""The process group of a command that was started by torchrun; nothing where it was not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wholebatch.cli.session import choose_device

__all__ = ["process_group"]


@contextmanager
def process_group(device: str) -> Iterator[tuple[int, torch.device]]:
    """This process's rank and device; the group is left as it was found."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    where = choose_device(device)
    if world == 1:
        yield 0, where
        return
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    mine = not torch.distributed.is_initialized()
    if mine:
        torch.distributed.init_process_group("nccl" if where.type == "cuda" else "gloo")
    try:
        yield torch.distributed.get_rank(), where
    finally:
        if mine and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
