"""Run under torchrun: TRL's trainers through `exact` on two ranks; rank 0 keeps the updates."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import trl_training as runs
from tests.integrations.trl_training import TRAINERS, grpo, off, trained
from wholebatch.errors import UnsupportedError
from wholebatch.integrations.transformers import exact


def main() -> None:
    report = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    with pytest.raises(UnsupportedError, match="dataloader_drop_last=True"):
        trained(runs.dpo(exact, 2))  # of 14 samples: Accelerate would repeat two
    runs.SAMPLES = 16
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
