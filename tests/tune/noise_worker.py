"""One rank of the tests of noise and of stragglers: what DDP measures, and that no bit changes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.support import measured
from tests.tune.test_noise import GRADIENT, SPREAD, Quadratic, gaussian, long_memory, probe_of
from wholebatch.losses.loss import Loss
from wholebatch.tune import Task
from wholebatch.tune.bottleneck import Bottleneck, find_bottleneck

WINDOWS = 100


def loss(model: torch.nn.Module, x: torch.Tensor) -> Loss:
    losses = model(x)
    return Loss(losses.sum(), len(x))


def made(rate: float, micro_batch: int, noise: int | None) -> wb.WholeBatch:
    model = Quadratic()
    return measured(
        DistributedDataParallel(model),
        torch.optim.SGD(model.parameters(), lr=rate),
        loss=loss,
        micro_batch=micro_batch,
        noise=noise,
    )


def run(shares: tuple[int, int], micro_batch: int) -> wb.WholeBatch:
    rank = dist.get_rank()
    train = made(0.0, micro_batch, 1)
    long_memory(train)
    for seed in range(WINDOWS):
        x = gaussian(sum(shares), gradient=GRADIENT, spread=SPREAD, seed=seed)
        mine = x[: shares[0]] if rank == 0 else x[shares[0] :]
        if rank == 1 and seed % 10 == 9:
            train.join(x[:1])
        else:
            train.step(mine)
    return train


def updated(noise: int | None) -> torch.Tensor:
    train = made(0.1, 5, noise)
    for seed in range(4):
        train.step(gaussian(17 + dist.get_rank(), gradient=1.0, spread=SPREAD, seed=seed))
    return next(train.model.parameters()).detach().clone()


def straggler() -> Bottleneck:
    """Return where the time goes if the second rank loads its batches slowly."""

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(8, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def classified(model: Any, micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    def batches() -> Any:
        time.sleep(0.4 if dist.get_rank() == 1 else 0)
        return {"x": torch.randn(6, 8), "y": torch.randint(0, 2, (6,))}

    return find_bottleneck(Task(build, classified, batches), micro_batch=4, precision="full")


def main(path: Path) -> None:
    dist.init_process_group("gloo")
    found = []
    for shares, micro_batch in (((105, 75), 15), ((128, 128), 128)):
        same = torch.equal(updated(None), updated(1))
        noise = probe_of(run(shares, micro_batch)).estimate
        assert noise is not None
        estimate = {"spread": noise.spread, "critical": noise.critical}
        found.append({**estimate, "same": same})
    slow = straggler()
    every: list[object] = [None, None]
    dist.all_gather_object(every, found)
    assert every[0] == every[1]
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
        told = json.dumps({**vars(slow), "name": slow.name})
        path.with_name("straggler.json").write_text(told)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
