"""Lightning's Trainer with accumulate_grad_batches, with and without wholebatch."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
from lightning import __version__
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from compare.problem import (
    LEARNING_RATE,
    Mode,
    Problem,
    Reader,
    Tokens,
    counted,
    flat,
    loss_of,
    rows_of,
)
from compare.row import Row
from wholebatch.integrations.lightning import ExactAccumulation


class Module(LightningModule):
    """The model as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.reader(batch["input_ids"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def train(problem: Problem, mode: Mode, **options: Any) -> Tensor:
    """One epoch of Lightning's Trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    size, steps = problem.batches(mode)
    several = problem.ranks > 1 and mode != "whole"
    module = Module()
    data = Tokens(problem)
    # In order, as on one process; the sampler that Lightning would put in shuffles.
    rank = int(os.environ.get("RANK", "0"))
    sampler: Any = DistributedSampler(data, problem.ranks, rank, shuffle=False) if several else None
    callbacks: list[Callback] = [ExactAccumulation(units=lambda batch: counted(batch["labels"]))]
    trainer = Trainer(
        **{"max_epochs": 1, **options},
        accelerator="cpu",
        strategy="ddp" if several else "auto",
        devices=problem.ranks if several else 1,
        accumulate_grad_batches=steps,
        gradient_clip_val=problem.clip_norm,
        callbacks=callbacks if mode == "ours" else None,
        precision="64-true",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data, batch_size=size, sampler=sampler))
    return flat(module)


def rows() -> list[Row]:
    return rows_of("Lightning", __version__, train, flat(Reader()))
