"""Run under torchrun: TRL's trainers through `exact` on two ranks; rank 0 keeps the updates."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.integrations.trl_training import TRAINERS, grpo, off, trained
from wholebatch.integrations.transformers import exact


def main() -> None:
    report = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    for name in ("DPO", "Reward", "KTO"):
        update = trained(TRAINERS[name](exact, 2))
        if rank == 0:
            torch.save(update, report.with_name(f"{name}.pt"))

    def policy(make: Any, batches: int) -> Any:
        return trained(grpo(make, batches, loss_type="bnpo"))

    whole = policy(exact, 1)
    ours, own = policy(exact, 2), policy(lambda kind: kind, 2)
    if rank == 0:
        report.write_text(json.dumps({"GRPO": off(ours, whole), "GRPO own": off(own, whole)}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
