"""Run under torchrun: ranks whose graphs are compiled at different times."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.support import distance, mlp, samples, sgd, summed
from wholebatch.compile import execute_mode, joint_graph, micro_step
from wholebatch.compile.compile_workers import Pending
from wholebatch.compile.execute_mode import ExecutePlan

WINDOWS = 12


class Later:
    """Stands for workers that end when they are told to."""

    def __init__(self) -> None:
        self.given: list[Pending] = []

    def compile(self, jobs: Any) -> Pending:
        self.given.append(Pending(jobs, expected=1.0))
        return self.given[-1]


def loss(model: Any, micro: Any) -> wb.Loss:
    return wb.Loss(summed(model, micro), len(micro["y"]))


def trained(rank: int) -> tuple[list[str], float]:
    """The mode of every window, and the distance from the undivided batch."""
    workers = Later()
    plan = ExecutePlan(eager=False, compiles=True, captures=False, auto=True)
    patched: list[tuple[Any, str, Any]] = [
        (ExecutePlan, "of", staticmethod(lambda execute, device: plan)),
        (execute_mode, "_TRACE_AFTER", 0.0),
        (micro_step.Executor, "compiles_beside_on", ("cpu",)),
        (micro_step, "compile_workers", lambda device: workers),
        (joint_graph, "compiled_by_inductor", lambda graph, arguments, **_: graph),
    ]
    for owner, name, value in patched:
        setattr(owner, name, value)
    batch = samples(20)
    own = {name: leaf[rank * 10 : rank * 10 + 10] for name, leaf in batch.items()}
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    train = wb.WholeBatch(DistributedDataParallel(model), sgd(model), loss=loss, micro_batch=5)
    optimizer = sgd(other)
    modes = []
    for window in range(WINDOWS):
        for pending in workers.given:
            pending.left = 0 if window > 2 + 3 * rank else 1
        train.step(own)
        modes.append(train._runner.executor.mode)
        optimizer.zero_grad()
        (summed(other, batch) / 20).backward()
        optimizer.step()
    return modes, distance(model.parameters(), other.parameters())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)
    dist.init_process_group("gloo")
    found = trained(int(os.environ["RANK"]))
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(gathered, file)
    dist.destroy_process_group()
