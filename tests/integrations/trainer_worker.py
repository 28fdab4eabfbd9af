"""Run under torchrun: `exact(Trainer)` as traced on two ranks; rank 0 keeps the weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from wholebatch.integrations.transformers import exact

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def trained(execute: str, folder: str) -> Any:
    """Train one epoch, by graphs or by eager code."""
    import compare.transformers as hosts
    from compare.problem import PROBLEMS, Tokens

    problem = PROBLEMS["two processes"]
    given = hosts.arguments(problem, "ours", folder, max_grad_norm=0.05)
    trainer = exact(Trainer, execute=execute)(  # type: ignore[arg-type]
        model=hosts.ReaderForTokenClassification(),
        args=TrainingArguments(**given),
        train_dataset=Tokens(problem),
    )
    trainer.train()
    executor = trainer._whole._runner.executor
    assert executor.mode == ("operations" if execute == "compile" else "eager"), executor.notes
    return trainer


if __name__ == "__main__":
    from compare.problem import flat

    from wholebatch.compile.execute_mode import ExecutePlan

    folder = sys.argv[1]
    plan: Any = ExecutePlan.of

    def traced(execute: str, device: torch.device) -> ExecutePlan:
        made: ExecutePlan = plan(execute, device)
        made.compiles = False
        return made

    ExecutePlan.of = staticmethod(traced)  # type: ignore[method-assign]
    for name in ("compile", "eager"):
        trainer = trained(name, folder)
        assert trainer.accelerator.num_processes == 2
        if os.environ["RANK"] == "0":
            torch.save(flat(trainer.model), Path(folder) / f"{name}.pt")
