"""Run under torchrun: `exact(Trainer)` as traced on two ranks; rank 0 keeps the weights."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

if __name__ == "__main__":
    import compare.transformers as hosts
    from compare.problem import PROBLEMS, Tokens, flat
    from transformers import Trainer, TrainingArguments

    from wholebatch.compile.execute_mode import ExecutePlan
    from wholebatch.integrations.transformers import exact

    _, execute, result = sys.argv
    plan: Any = ExecutePlan.of

    def traced(execute: str, device: torch.device) -> ExecutePlan:
        made: ExecutePlan = plan(execute, device)
        made.compiles = False
        return made

    ExecutePlan.of = staticmethod(traced)  # type: ignore[method-assign]
    problem = PROBLEMS["two processes"]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(**hosts.arguments(problem, "ours", folder, max_grad_norm=0.05))
        model = hosts.ReaderForTokenClassification()
        trainer = exact(Trainer, execute=execute)(  # type: ignore[arg-type]
            model=model, args=args, train_dataset=Tokens(problem)
        )
        trainer.train()
    executor = trainer._whole._runner.executor
    assert executor.mode == ("operations" if execute == "compile" else "eager"), executor.notes
    assert trainer.accelerator.num_processes == 2
    if os.environ["RANK"] == "0":
        torch.save(flat(model), result)
