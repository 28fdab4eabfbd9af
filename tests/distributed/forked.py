"""RANKS SCRIPT ARGUMENTS: a script on several ranks of this machine, as torchrun would start it.

Importing torch takes longer than most of what the ranks are to show. So it is imported once, before
there is any thread, and each rank is forked from here: it runs the script as `__main__` and goes
through the interpreter's own end. A store for them to meet in is held by a process of its own, as
torchrun's agent holds it. A rank that fails ends the others.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import time

import numpy
import torch
import torch._dynamo  # what an optimizer imports when it is made, FSDP2 with it
import torch.distributed as dist

import wholebatch as wb

PRELOADED = (wb.WholeBatch, wb.Accumulator)


def hold_store() -> tuple[int, int]:
    """The port of a store that lives until the descriptor that comes with it is closed."""
    (read_port, write_port), (wait, held) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(held)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write_port, str(store.port).encode())
        os.close(write_port)
        os.read(wait, 1)  # until nobody holds the other end
        os._exit(0)
    os.close(write_port)
    os.close(wait)
    return int(os.read(read_port, 16)), held


def start(ranks: int, port: int, held: int) -> list[int] | None:
    """The processes, by rank; None in each of them."""
    started = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            os.close(held)
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({name: str(value) for name, value in own.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
            random.seed()  # what each process would have drawn from the system by itself
            numpy.random.seed()
            return None
        started.append(process)
    return started


def wait_for(processes: list[int]) -> int:
    """1 if any of them failed, which ends the rest."""
    running, failed, killed_at = set(processes), 0, float("inf")
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            running.discard(process)
            if os.waitstatus_to_exitcode(status) and not failed:
                code = os.waitstatus_to_exitcode(status)
                print(f"rank {processes.index(process)} failed: {code}", file=sys.stderr)
                failed, killed_at = 1, time.monotonic() + 10.0
                for other in running:
                    os.kill(other, signal.SIGTERM)
        elif not process:
            if time.monotonic() > killed_at:
                for other in running:
                    os.kill(other, signal.SIGKILL)
            time.sleep(0.01)
    return failed


def main() -> None:
    if len(os.listdir("/proc/self/task")) > 1:  # a process with threads is not one to fork
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", *sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, *run])
    port, held = hold_store()
    started = start(int(sys.argv[1]), port, held)
    if started is not None:
        sys.exit(wait_for(started))
    script, sys.argv = sys.argv[2], sys.argv[2:]
    sys.path[0] = os.path.dirname(script)
    torch.set_num_threads(1)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
