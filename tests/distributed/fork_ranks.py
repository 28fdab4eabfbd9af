"""Starts the ranks of job after job as forks of one process, which has imported torch for all.

Reads a line of JSON for each job (`script`, `arguments`, `ranks`, `environment`, `folder`,
`timeout`) and answers with the exit status of every rank. FOLDER gets `RANK.out` and `RANK.err`.

A rank is what torchrun would start, but for the agent: rank 0 holds the store of the job. It runs
through the interpreter's own end.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

# What the workers import, and what torch and wholebatch import when they are first used.
import torch._dynamo
import torch._subclasses.schema_check_mode
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import torch.profiler  # noqa: F401

import tests.memory.models
import tests.support  # noqa: F401
import wholebatch.cli
import wholebatch.core.accumulator
import wholebatch.core.whole_batch
import wholebatch.distributed.ddp
import wholebatch.distributed.fsdp  # noqa: F401

_OTHERS = 20.0  # seconds that the others get to end after one has failed


def start(job: dict[str, Any]) -> dict[int, int] | None:
    """Return the processes by rank; in each of them None, with its environment and files set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: dict[int, int] = {}
    for rank in range(job["ranks"]):
        processes[rank] = os.fork()
        if processes[rank] == 0:
            _become(rank, port, job)
            return None
    return processes


def _become(rank: int, port: int, job: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(job["environment"])
    size = str(job["ranks"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    folder = Path(job["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv = [job["script"], *job["arguments"]]
    sys.path[0] = str(Path(job["script"]).parent)


def end(processes: dict[int, int], timeout: float) -> list[int]:
    """Return the exit status of every rank; what is left when time is over is killed."""
    until = time.monotonic() + timeout
    status: dict[int, int] = {}
    while len(status) < len(processes):
        for rank in processes.keys() - status.keys():
            process, raw = os.waitpid(processes[rank], os.WNOHANG)
            if process:
                status[rank] = os.waitstatus_to_exitcode(raw)
                if status[rank]:
                    until = min(until, time.monotonic() + _OTHERS)
        if time.monotonic() > until:
            for rank in processes.keys() - status.keys():
                os.kill(processes[rank], signal.SIGKILL)
        time.sleep(0.005)
    return [status[rank] for rank in sorted(status)]


def serve() -> bool:
    """Start and end jobs until there are no more; True in a rank, which is to run its script."""
    gc.collect()
    gc.freeze()  # what is imported: no rank goes through it when it ends
    while line := sys.stdin.readline():
        job = json.loads(line)
        processes = start(job)
        if processes is None:
            return True
        print(json.dumps(end(processes, job["timeout"])), flush=True)
    return False


if __name__ == "__main__" and serve():
    runpy.run_path(sys.argv[0], run_name="__main__")
