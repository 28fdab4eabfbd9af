"""Run under torchrun: every way to keep gradients, against one process on the global batch."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.problem import Micro, everyones, fresh, loss, micro, undivided
from tests.offload.seen import watching
from tests.support import adamw, distance, sgd
from wholebatch.options import grouped

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
    known = count if options.get("gradients") == "release" or case == "counts" else None
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


def accumulated_moments(case: str, dtype: torch.dtype) -> dict[str, float]:
    """Adam accumulation over the ranks beside the undivided batch, for two windows.

    After the first nothing is rounded yet, so that the second first moment is exact too.
    """
    mine = windows_of(case, dist.get_rank())[:2]
    whole = undivided(everyones(mine), None, adamw)
    model = DistributedDataParallel(fresh().to(dtype))
    optimizer = adamw(model)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=loss,
        micro_batch=1,
        units=count,
        audit=False,
        memory=wb.Memory(gradients="moments"),
    )
    train._fitting.split = list  # type: ignore[method-assign, assignment]
    for batch in train.over(mine):
        train.step(batch)
    pairs = list(zip(model.parameters(), whole.model.parameters(), strict=True))
    update = [
        p.detach() - q for p, q in zip(model.parameters(), whole.start.parameters(), strict=True)
    ]
    found = {"rounded update": distance(update, whole.updates())}
    for name in ("exp_avg", "exp_avg_sq"):
        ours = [optimizer.state[p].get(name, torch.zeros_like(p)) for p, _ in pairs]
        right = [whole.optimizer.state[q].get(name, torch.zeros_like(q)) for _, q in pairs]
        found[name if name == "exp_avg" else "rounded second"] = distance(ours, right)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [p.detach() for p in model.parameters()])
    same = all(all(map(torch.equal, everyone[0], other)) for other in everyone)
    return {**found, "ranks differ": float(not same)}


def resumed() -> dict[str, float]:
    """Host sums saved in the middle of a window on every rank; the same bits afterwards."""
    (window, *_) = windows_of("tokens", dist.get_rank())

    def start() -> tuple[nn.Module, wb.WholeBatch]:
        model = DistributedDataParallel(fresh())
        train = wb.WholeBatch(
            model,
            sgd(model),
            loss=loss,
            micro_batch=1,
            audit=False,
            memory=wb.Memory(gradients="host"),
        )
        train._fitting.split = list  # type: ignore[method-assign, assignment]
        return model, train

    straight, train = start()
    saved: dict[str, Any] = {}
    train.step(
        window, after_micro=lambda done, _: saved.update(train.state_dict()) if done == 2 else None
    )
    again, other = start()
    other.load_state_dict(saved)
    other.step(window)
    same = all(map(torch.equal, straight.parameters(), again.parameters()))
    return {"update": 0.0 if same else 1.0}


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for case in SIZES:
        for on in ("device", "host"):
            results[f"host {case} {on}"] = trained(
                case, sgd, gradients="host", optimizer_on=on, clip_norm=0.05
            )
        results[f"host {case} adamw"] = trained(case, adamw, gradients="host")
        results[f"release {case}"] = trained(case, sgd, gradients="release", nonfinite="skip")
        results[f"swap {case} adamw"] = trained(case, adamw, gradients="swap", clip_norm=0.05)
        results[f"moments {case}"] = accumulated_moments(case, torch.float64)
    results["release adamw"] = trained("unused", adamw, gradients="release", nonfinite="skip")
    results["moments in float32"] = accumulated_moments("tokens", torch.float32)
    results["resumed"] = resumed()
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
