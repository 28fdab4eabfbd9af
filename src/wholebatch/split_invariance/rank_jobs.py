"""Run `train` on one rank or several: spawned processes with a gloo group."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from wholebatch.errors import OptionError
from wholebatch.split_invariance.observed_run import Observed, Run, Train, observe

_TIMEOUT = timedelta(minutes=10)


Job: TypeAlias = tuple[Train, Run]


def observe_on(ranks: int, jobs: Sequence[Job]) -> list[list[Observed]]:
    """Return what each run shows on each rank, all of them by the same so many processes."""
    train = jobs[0][0]
    try:
        pickle.dumps(jobs)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"train={getattr(train, '__qualname__', train)!r} on several ranks: must be a function "
            f"at the top level of a module, which other processes can import ({error})"
        ) from None
    with socket.socket() as free, TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        processes.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _rank, (ranks, port, list(jobs), folder), nprocs=ranks, start_method="spawn"
        )
        return [
            [torch.load(_path(folder, run, rank), weights_only=False) for rank in range(ranks)]
            for run in range(len(jobs))
        ]


def _path(folder: str, run: int, rank: int) -> Path:
    return Path(folder) / f"{run}-{rank}.pt"


def _rank(rank: int, ranks: int, port: int, jobs: list[Job], folder: str) -> None:
    """Be one rank: run each job, and save what it shows."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=_TIMEOUT)
    for index, (train, run) in enumerate(jobs):
        torch.save(observe(train, run), _path(folder, index, rank))
        dist.barrier()
    dist.destroy_process_group()
