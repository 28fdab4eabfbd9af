"""Tensor parallelism on 4 ranks, alone and beside FSDP2, against the undivided batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import wholebatch as wb
from tests.distributed.problem import full, outcome
from tests.support import distance, loss


class Net(nn.Module):
    """Of its four layers, two are sliced: gradients on two meshes, or of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 8)
        self.down, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        added = self.down(torch.tanh(self.up(self.norm(x))))
        return self.head(x + added)


def model_and_batch() -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Net().double()
    x, y = torch.randn(11, 6, dtype=torch.float64), torch.randint(0, 3, (11,))
    y[::4] = -100
    return model, {"x": x, "y": y}


def off_by(sharded: bool, close: dict[str, Any], clip_norm: float | None) -> dict[str, float]:
    whole, batch = model_and_batch()
    model, origin = copy.deepcopy(whole), copy.deepcopy(whole)
    ranks = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (2 if sharded else 1, ranks // (2 if sharded else 1)), mesh_dim_names=("dp", "tp")
    )
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    mine = batch
    if sharded:
        fully_shard(model, mesh=mesh["dp"])
        cut = slice(0, 7) if mesh.get_local_rank("dp") == 0 else slice(7, 11)
        mine = {name: value[cut] for name, value in batch.items()}
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    nn.functional.cross_entropy(whole(batch["x"]), batch["y"]).backward()
    norm = nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None])
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(whole.parameters(), clip_norm)
    else:
        nn.utils.clip_grad_value_(whole.parameters(), 0.01)
    optimizer.step()
    train = wb.WholeBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        micro_batch=2,
        clip_norm=clip_norm,
        close=wb.Close(**close),
    )
    step = train.step(mine)
    starts = list(origin.parameters())
    moved = [full(p).detach() - o.detach() for p, o in zip(model.parameters(), starts, strict=True)]
    right = [p.detach() - o.detach() for p, o in zip(whole.parameters(), starts, strict=True)]
    return {"update": distance(moved, right), "norm": abs(step.grad_norm / norm.item() - 1)}


def refused() -> dict[str, str]:
    model, _ = model_and_batch()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    wrapped = nn.parallel.DistributedDataParallel(model)
    parallelize_module(model, mesh, {"up": ColwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters())
    return {
        "ddp": outcome(lambda: wb.WholeBatch(wrapped, optimizer, loss=loss, micro_batch=2)),
        "gathered": outcome(lambda: off_by(True, {"sync": "gathered"}, 0.05)),
    }


def report() -> dict[str, Any]:
    off = {
        "alone": off_by(False, {}, 0.05),
        "alone, by value": off_by(False, {"clip_value": 0.01}, None),
        "fsdp2": off_by(True, {}, 0.05),
        "fsdp2, by value": off_by(True, {"clip_value": 0.01}, None),
    }
    return {"off": off, "refused": refused()}
