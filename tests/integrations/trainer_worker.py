"""Run under torchrun: `exact(Trainer)` as traced on two ranks; rank 0 keeps the weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from tests.integrations.stops import Stop
from wholebatch.integrations.transformers import exact

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def trained(execute: str, folder: str, **options: Any) -> Any:
    """Train one epoch, from a checkpoint if one is given."""
    import compare.transformers as hosts
    from compare.problem import PROBLEMS, Tokens

    problem = PROBLEMS["two processes"]
    saves = "steps" if options else "no"
    given = hosts.arguments(problem, "ours", folder, max_grad_norm=0.05, save_strategy=saves)
    trainer = exact(Trainer, execute=execute)(  # type: ignore[arg-type]
        model=hosts.ReaderForTokenClassification(),
        args=TrainingArguments(**given),
        train_dataset=Tokens(problem),
    )
    if options.get("stops"):
        trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=options.get("checkpoint"))
    return trainer


def straight(execute: str, folder: str) -> Any:
    """Train without a stop, by graphs or by eager code."""
    trainer = trained(execute, folder)
    executor = trainer._whole._runner.executor
    assert executor.mode == ("operations" if execute == "compile" else "eager"), executor.notes
    return trainer


def resumed(folder: str) -> Any:
    """Stop in the middle of the second window, and begin it again from the checkpoint."""
    left = trained("eager", folder, stops=True)
    assert left.state.global_step == 1
    checkpoint = Path(folder) / "checkpoint-1"
    trainer = trained("eager", folder, checkpoint=str(checkpoint))
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
    trainers = {
        "compile": straight("compile", folder),
        "eager": straight("eager", folder),
        "resumed": resumed(folder),
    }
    for name, trainer in trainers.items():
        assert trainer.accelerator.num_processes == 2
        if os.environ["RANK"] == "0":
            torch.save(flat(trainer.model), Path(folder) / f"{name}.pt")
