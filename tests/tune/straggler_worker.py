"""One rank of two: the second one loads its batches slowly."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch.tune import Task
from wholebatch.tune.bottleneck import find_bottleneck


def main(path: Path) -> None:
    dist.init_process_group("gloo")
    slow = dist.get_rank() == 1

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(8, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    def batches() -> Any:
        time.sleep(0.4 if slow else 0)
        return {"x": torch.randn(6, 8), "y": torch.randint(0, 2, (6,))}

    found = find_bottleneck(Task(build, loss, batches), micro_batch=4, precision="full")
    if not slow:
        path.write_text(json.dumps({**vars(found), "name": found.name}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
