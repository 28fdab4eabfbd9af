"""Run under torchrun: optimizer state on the host, against one process on the global batch."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.problem import Micro, everyones, fresh, loss, micro, undivided
from tests.offload.seen import watching
from tests.support import adamw, distance

SIZES = {
    "exhausted": ([[2, 1, 1]], [[2, 1, 1], [1, 2], [3]]),
    "nothing": ([], [[2, 1], [3]]),
    "unused": ([[2, 1, 3], [1, 1, 2]], [[2, 1, 3], [1, 1, 2]]),
}


def windows_of(case: str, rank: int) -> list[list[Micro]]:
    return [
        [
            micro(1000 * rank + 10 * w + i, n, branch=case == "unused" and rank == 0 and i == 0)
            for i, n in enumerate(window)
        ]
        for w, window in enumerate(SIZES[case][rank])
    ]


def trained(case: str) -> dict[str, float]:
    """One way beside the undivided batch: gradients, update, and that no gradient is left."""
    mine = windows_of(case, dist.get_rank())
    whole = undivided(everyones(mine), 0.05, adamw)
    model = DistributedDataParallel(fresh())
    optimizer = adamw(model)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=loss,
        micro_batch=1,
        clip_norm=0.05,
        memory=wb.Memory(optimizer_state="host"),
        # Where a rank has no data at all, it must still take part in the others' look at the model.
        audit=case == "nothing",
    )
    train._fitting.split = list  # type: ignore[method-assign, assignment]
    with watching(model) as parts:
        for batch in train.over(mine):
            train.step(batch)
        seen = parts.take_all()
    worst = max(distance(a, b) for a, b in zip(seen, whole.seen.gradients, strict=True))
    update = [
        p.detach() - q.detach()
        for p, q in zip(model.parameters(), whole.start.parameters(), strict=True)
    ]
    left = sum(p.grad is not None for p in model.parameters())
    moved = (model.module.never.weight - whole.start.never.weight).abs().max().item()
    return {
        "gradients": worst,
        "update": distance(update, whole.updates()),
        "left": float(left),
        "never": moved,
    }


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = {case: trained(case) for case in SIZES}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    if dist.get_rank() == 0:
        worst = {
            name: {key: max(r[name][key] for r in gathered) for key in results[name]}
            for name in results
        }
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(worst, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
