"""Run under torchrun: what a watch finds in loops of several ranks, and that it changes none."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import wholebatch as wb
from tests.verification.answers import found_in, quiet

SIZES = ([5, 2, 7, 3], [1, 6, 2, 4])
LOOPS = {
    "units of all ranks": "right",
    "own units": "mean-of-means",
    "not divided": "not-divided",
    "sums": "not judged",
    "never reduced": "unsynchronised-ranks",
    "the first clips": "unsynchronised-ranks",
    "a rank makes fewer windows": "right",
}


def trained(name: str, *, watches: bool) -> tuple[list[Any], str]:
    """Train on this rank; return the weights and what a watch found."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped: Any = model if name == "never reduced" else nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank + 1)
    own = float(sum(SIZES[rank]))
    everywhere = float(sum(map(sum, SIZES)))
    total = {"own units": own, "sums": 1.0, "not divided": 1.0}.get(name, everywhere / ranks)
    reduction = "mean" if name == "not divided" else "sum"
    watch = wb.watch(model, optimizer) if watches else nullcontext()
    with quiet(), watch:
        for window in range(4):
            if name == "a rank makes fewer windows" and window == 3:
                break
            for place, size in enumerate(SIZES[rank]):
                x, y = torch.randn(size, 6), torch.randint(0, 5, (size,))
                is_last = place + 1 == len(SIZES[rank])
                held = nullcontext() if is_last or wrapped is model else wrapped.no_sync()
                with held:
                    loss = F.cross_entropy(wrapped(x), y, reduction=reduction)
                    (loss / total).backward()
            if name == "the first clips" and rank == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    weights = [parameter.detach().tolist() for parameter in model.parameters()]
    return weights, found_in(watch.verdict) if watches else ""  # type: ignore[union-attr]


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, key in LOOPS.items():
        plain, _ = trained(name, watches=False)
        watched, answer = trained(name, watches=True)
        found[name] = [answer, key, plain == watched]
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
