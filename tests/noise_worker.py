"""One rank of the noise scale's test: what DDP measures, and that it changes no bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.support import measured
from tests.test_noise import GRADIENT, SPREAD, Quadratic, gaussian, long_memory, still
from wholebatch.core.loss import Loss

WINDOWS = 200


def loss(model: torch.nn.Module, x: torch.Tensor) -> Loss:
    losses = model(x)
    return Loss(losses.sum(), len(x))


def run(shares: tuple[int, int], micro_batch: int, noise: int | None) -> wb.WholeBatch:
    rank = dist.get_rank()
    model = Quadratic()
    train = measured(
        DistributedDataParallel(model),
        still(model),
        loss=loss,
        micro_batch=micro_batch,
        noise=noise,
    )
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
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = measured(
        DistributedDataParallel(model), optimizer, loss=loss, micro_batch=5, noise=noise
    )
    for seed in range(4):
        train.step(gaussian(17 + dist.get_rank(), gradient=1.0, spread=SPREAD, seed=seed))
    return model.first.detach().clone()


def main(path: Path) -> None:
    dist.init_process_group("gloo")
    same = torch.equal(updated(None), updated(1))
    found = []
    for shares, micro_batch in (((35, 25), 7), ((32, 32), 64)):
        noise = run(shares, micro_batch, 1).noise
        assert noise is not None
        found.append({"spread": noise.spread, "critical": noise.critical, "same": same})
    every: list[object] = [None, None]
    dist.all_gather_object(every, found)
    assert every[0] == every[1]
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
