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
from tests.support import adamw, distance, grouped, sgd

SIZES = {
    "tokens": ([[1, 3, 1], [2, 1, 1]], [[3, 3, 1], [2, 1, 5]]),
    "counts": ([[2], [1, 1, 1]], [[2, 2], [1, 1]]),
    "exhausted": ([[2, 1, 1]], [[2, 1, 1], [1, 2], [3]]),
    "once": ([[3], [2]], [[1], [4]]),
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


def count(m: Micro | list[Micro]) -> int:
    """Of a micro-batch, or of a batch, which is a list of them here."""
    if isinstance(m, list):
        return sum(map(count, m))
    return int((m["labels"] != -100).sum())


def trained(case: str, make: Any, **options: Any) -> dict[str, float]:
    """One way beside the undivided batch: gradients, update, and that no gradient is left."""
    clip = options.get("clip_norm")
    mine = windows_of(case, dist.get_rank())
    whole = undivided(everyones(mine), clip, make)
    model = DistributedDataParallel(fresh())
    optimizer = make(model)
    known = count if case == "counts" else None
    # Where a rank has no data at all, it must still take part in the others' look at the model.
    options["audit"] = case == "nothing"
    train = wb.WholeBatch(
        model, optimizer, loss=loss, units=known, **grouped({"micro_batch": 1, **options})
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
    results: dict[str, dict[str, float]] = {}
    for case in SIZES:
        for make in (sgd, adamw):
            results[f"{case} {make.__name__}"] = trained(
                case, make, optimizer_state="host", clip_norm=0.05
            )
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
