"""The process group of a command that was started by torchrun; nothing where it was not."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from wholebatch.cli.training_run import choose_device
from wholebatch.distributed.rank_failure import alarm
from wholebatch.errors import RankError

__all__ = ["agree_on_attempt", "process_group"]

_TIMEOUT = 600.0


@contextmanager
def process_group(
    device: str, *, deadline: float | None = None
) -> Iterator[tuple[int, torch.device]]:
    """This process's rank and device; the group is left as it was found.

    Torch itself gives up on a rank later than a `deadline` that was asked for.
    """
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
        patience = None
        if deadline is not None and deadline < math.inf:
            patience = timedelta(seconds=max(1800.0, 1.5 * deadline))
        _join("nccl" if where.type == "cuda" else "gloo", patience)
    try:
        yield torch.distributed.get_rank(), where
    finally:
        if mine and torch.distributed.is_initialized():
            alarm().leave_if_one_hangs()
            torch.distributed.destroy_process_group()
            gc.collect()  # models still hold the group, whose threads end with it: now, not at exit


def _join(backend: str, timeout: timedelta | None) -> None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        torch.distributed.init_process_group(backend, timeout=timeout)
        return
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    # Torchrun keeps its store over restarts, and nothing in it tells an attempt from the one
    # before: ranks would read addresses of processes that are dead (pytorch issue 135712), and
    # TORCHELASTIC_RESTART_COUNT is not the same on all machines. So they agree on a name.
    store, rank, world = next(rendezvous("env://"))
    attempt = agree_on_attempt(store, rank=rank, ranks=world)
    torch.distributed.init_process_group(
        backend,
        timeout=timeout,
        store=PrefixStore(f"wholebatch/{attempt}", store),
        rank=rank,
        world_size=world,
    )


def agree_on_attempt(store: Any, *, rank: int, ranks: int, timeout: float = _TIMEOUT) -> str:
    """A name that exactly the processes that are alive now share, out of a store with old entries.

    Every rank writes a name of its own. The first one calls the roll of what it reads; a rank
    that finds its name on it says that it has seen this very roll. Old processes have not: when
    all ranks have seen it, all names on it are of the living. Until then the roll is called again
    whenever a name has changed.
    """
    own = uuid.uuid4().hex
    store.set(f"wholebatch/here/{rank}", own)
    called = seen = ""
    pause, until = 0.005, time.monotonic() + timeout
    while time.monotonic() < until:
        if rank == 0:
            here = ",".join(_read(store, "here", ranks))
            if here != called:
                store.set("wholebatch/roll", called := here)
        [roll] = _read(store, "roll")
        attempt = hashlib.sha256(roll.encode()).hexdigest()[:16]
        names = roll.split(",")
        if len(names) == ranks and names[rank] == own:
            if attempt != seen:
                store.set(f"wholebatch/seen/{rank}", seen := attempt)
            if rank == 0 and set(_read(store, "seen", ranks)) == {attempt}:
                store.set("wholebatch/go", attempt)
            if _read(store, "go") == [attempt]:
                return attempt
        time.sleep(pause)
        pause = min(0.2, pause * 1.2)
    raise RankError(f"rank {rank} waited {timeout:.0f} s for the other {ranks - 1} ranks to start")


def _read(store: Any, what: str, ranks: int | None = None) -> list[str]:
    """Entries of the store, "" where there is none; of every rank, if there are several."""
    keys = [f"wholebatch/{what}"]
    if ranks is not None:
        keys = [f"{keys[0]}/{rank}" for rank in range(ranks)]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]
