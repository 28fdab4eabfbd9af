"""Run under torchrun: verify on engines of several ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.verification.example_models import loss


def in_engine(kind: str, rank: int) -> dict[str, Any]:
    """The verdict of `wb.verify` on a model inside an engine."""
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)]
    if kind == "ddp-batchnorm":
        layers.insert(1, nn.BatchNorm1d(16))
    plain = nn.Sequential(*layers)
    model: nn.Module = plain
    if kind.startswith("ddp"):
        model = DistributedDataParallel(plain)
    else:
        model = fully_shard(plain, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    generator = torch.Generator().manual_seed(rank)
    size = 9 + 4 * rank
    batch = {
        "x": torch.randn(size, 12, generator=generator),
        "y": torch.randint(0, 5, (size,), generator=generator),
    }
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    verdict = wb.verify(model, loss, batch, micro_batch=4, optimizer=optimizer, clip_norm=0.05)
    untouched = all(bool((a == b).all()) for a, b in zip(before, model.parameters(), strict=True))
    return {**verdict.to_dict(), "untouched": untouched and not optimizer.state}


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {"engines": {}}
    for kind in ("ddp", "fsdp2", "ddp-batchnorm"):
        found["engines"][kind] = in_engine(kind, rank)
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
