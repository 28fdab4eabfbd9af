"""Run under torchrun: losses that talk to other ranks, tested on different samples."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.support import distance, mlp, samples, sgd
from wholebatch.errors import UnsupportedError


def gathered(value: Tensor) -> Tensor:
    parts = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.detach())
    return torch.stack(parts)


def with_a_metric(model: Any, batch: Any) -> wb.Loss:
    """A plain loss that gathers a metric, as TRL's SFTTrainer does; some samples have no units."""
    losses = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    total = (losses * batch["kept"]).sum()
    gathered(total).mean()
    return wb.Loss(total, batch["kept"].sum())


def trained(rank: int) -> float:
    """How far three updates are from those of the undivided batch.

    The ranks test different samples. Rank 0 learns nothing from its test, so that all ranks test
    window 3, too.
    """
    batch = samples(20)
    batch["kept"] = torch.ones(20, dtype=torch.float64)
    batch["kept"][:8] = 0.0  # all that rank 0 tests
    own = {name: leaf[rank * 10 : rank * 10 + 10] for name, leaf in batch.items()}
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    train = wb.WholeBatch(
        DistributedDataParallel(model), sgd(model), loss=with_a_metric, micro_batch=4
    )
    optimizer = sgd(other)
    for _ in range(3):
        train.step(own)
        losses = functional.cross_entropy(other(batch["x"]), batch["y"], reduction="none")
        ((losses * batch["kept"]).sum() / batch["kept"].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return distance(model.parameters(), other.parameters())


def compares(model: Any, batch: Any) -> wb.Loss:
    """Compares the samples of all ranks, with gradients through the gather."""
    z = functional.normalize(model(batch["x"]), dim=1)
    everyone = torch.cat(dist.nn.functional.all_gather(z))
    targets = torch.arange(len(z)) + dist.get_rank() * len(z)
    return wb.Loss(functional.cross_entropy(z @ everyone.T, targets, reduction="sum"), len(z))


def refused() -> str:
    model = mlp()
    train = wb.WholeBatch(DistributedDataParallel(model), sgd(model), loss=compares, micro_batch=4)
    try:
        train.step(samples(16))
    except UnsupportedError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    faulthandler.dump_traceback_later(220, exit=True)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    report = {"distance": trained(rank), "refused": refused()}
    if rank == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(report, file)
    dist.destroy_process_group()
