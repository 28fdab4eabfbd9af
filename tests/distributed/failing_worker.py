"""Pairs of ranks, without an agent that would kill the other, of which one fails or hangs.

Torch is imported once, and every rank is forked from here, all cases at the same time. A rank then
runs on to the end of this file and through the interpreter's own end, as a process that was started
by itself would. Nothing here depends on how fast the machine is: deadlines begin when the failing
rank has failed, and the other one goes on only then.

FOLDER gets `CASE-RANK.err`, the time of the failure in `CASE.failed`, and `report.json`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch._dynamo  # what an optimizer imports when it is made
import torch.distributed as dist

import wholebatch as wb
from tests.distributed.exact_worker import wrapped
from tests.distributed.problem import Micro, loss, micro
from tests.support import sgd
from wholebatch.accumulator import Accumulator
from wholebatch.distributed import ddp, fsdp  # noqa: F401 (imported before the forks)
from wholebatch.distributed import rank_failure as alarm_module
from wholebatch.distributed.rank_failure import alarm
from wholebatch.whole_batch import WholeBatch

CASES = [
    "ddp-raises-1",
    "ddp-dies-1",
    "ddp-leaves-1",
    "ddp-catches-0",
    "ddp-catches-1",
    "ddp-refuses-0",
    "ddp-refuses-1",
    "ddp-sleeps-1",
    "ddp-stops-0",
    "ddp-stops-1",
    "fsdp2-raises-0",
    "fsdp2-raisesinside-1",
    "fsdp2-dies-1",
    "fsdp2-leaves-1",
    "fsdp2-catches-1",
    "fsdp2-sleeps-0",
]
AT_MOST = 240.0
DEADLINE = 2.0
ANSWER = {"sleeps": 60.0, "stops": 1.0}  # a slow rank answers late, a stopped one never
GRACE = 4.0


def start(case: str, folder: Path) -> dict[int, int] | None:
    """The two processes, by rank; None in each of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = {}
    for rank in range(2):
        started[rank] = os.fork()
        if started[rank] == 0:
            os.environ.update(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank)
            )
            said = os.open(folder / f"{case}-{rank}.err", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 2)
            return None
    return started


def end(cases: dict[str, dict[int, int]]) -> dict[str, list[tuple[int, float]]]:
    """How and when each rank of these cases ended; what is left after a while is killed."""
    begun = time.monotonic()
    open_ = {process for case in cases.values() for process in case.values()}
    ended: dict[int, tuple[int, float]] = {}
    while open_:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            ended[process] = os.waitstatus_to_exitcode(status), time.time()
            open_.discard(process)
            continue
        gone = {name for name, case in cases.items() if len(open_ & {*case.values()}) == 1}
        for name in gone:  # a stopped one never ends by itself
            if "-stops-" in name:
                with suppress(ProcessLookupError):
                    os.kill(cases[name][int(name[-1])], signal.SIGKILL)
        if time.monotonic() - begun > AT_MOST:
            for process in open_:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return {name: [ended[case[rank]] for rank in range(2)] for name, case in cases.items()}


def train(case: str, folder: Path) -> None:
    engine, how, failing = case.split("-")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    model = wrapped(engine)
    failed = folder / f"{case}.failed"
    fails = rank == int(failing)
    if how in ("raisesinside", "catches"):
        train_whole(case, model, folder)
        return
    acc = Accumulator(model, sgd(model), steps=2)
    for i, m in enumerate(acc.over([micro(10 * rank + i, 2) for i in range(6)])):
        if i == 0 and how == "refuses" and fails:
            failed.write_text(repr(time.time()))
            acc.backward(compares_samples(model, m))
        if i == 3 and how in ("sleeps", "stops"):
            prepare(case, fails, failed)
        if i == 3 and fails:
            if how == "sleeps":
                hangs_here(failed)
            failed.write_text(repr(time.time()))  # from now the other waits
            if how == "raises":
                raise ValueError("sample 17 is broken")
            if how == "leaves":
                break
            if how == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(9)  # "dies": killed, with no chance to say anything
        acc.backward(loss(model, m))
    dist.destroy_process_group()


def prepare(case: str, fails: bool, failed: Path) -> None:
    """Set short deadlines; the rank that does not fail first waits until the other has."""
    alarm_module._ANSWER = ANSWER[case.split("-")[1]]
    alarm_module._GRACE = GRACE
    if fails and case == "ddp-sleeps-1":
        # Rank 0 finds it, ends and takes the store along, if it does not wait for this one.
        alarm_module._LOOK_EVERY = 3.0
        return
    while not fails and not failed.exists():
        time.sleep(0.01)
    alarm().progress.mark()
    alarm().progress.fixed = DEADLINE


def hangs_here(failed: Path) -> None:
    failed.write_text(repr(time.time()))
    time.sleep(1000)


def compares_samples(model: torch.nn.Module, m: Micro) -> wb.Loss:
    logits = model(m["tokens"])
    return wb.Loss((logits - logits.mean(0)).square().sum(), len(logits))


def train_whole(case: str, model: torch.nn.Module, folder: Path) -> None:
    """`WholeBatch` with a loss that fails on one rank; "catches": a script that says nothing."""
    _, how, failing = case.split("-")
    calls = 0

    def broken(model: torch.nn.Module, m: dict[str, torch.Tensor]) -> wb.Loss:
        nonlocal calls
        calls += 1
        if calls == 4 and dist.get_rank() == int(failing):
            (folder / f"{case}.failed").write_text(repr(time.time()))
            raise ValueError("sample 17 is broken")
        return loss(model, m)

    # Without the look, which calls the loss function as well.
    train = WholeBatch(model, sgd(model), loss=broken, micro_batch=2, audit=False)
    try:
        for i in range(6):
            train.step(micro(10 * dist.get_rank() + i, 4))
    except Exception as error:
        if how == "raisesinside":
            raise
        (folder / f"{case}-{dist.get_rank()}.caught").write_text(f"{type(error).__name__}: {error}")
        sys.exit(3)


def launch(folder: Path) -> str | None:
    """Run all cases and report; in a process that was started, the case that it is to train."""
    gc.freeze()  # what is imported: no rank goes through it when it ends
    running = {}
    for case in CASES:
        started = start(case, folder)
        if started is None:
            return case
        running[case] = started
    (folder / "report.json").write_text(json.dumps(end(running)), encoding="utf-8")
    return None


if __name__ == "__main__":
    mine = launch(Path(sys.argv[1]))
    if mine is not None:
        train(mine, Path(sys.argv[1]))
