"""Lightning's Trainer with accumulate_grad_batches, with and without wholebatch."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from typing import Any

import torch
from lightning import __version__
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from compare import laws
from compare.problem import (
    LEARNING_RATE,
    Mode,
    Problem,
    Reader,
    Tokens,
    counted,
    flat,
    from_two_processes,
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


class Given(LightningModule):
    """A model, its optimizer and its loss, as they are given."""

    def __init__(self, model: nn.Module, optimizer: Any, loss: Any) -> None:
        super().__init__()
        self.model, self.given, self.loss = model, optimizer, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self.model, batch)
        return loss

    def configure_optimizers(self) -> Any:
        return self.given


class Stop(Callback):
    """Saves after some micro-batches of an epoch, and stops."""

    def __init__(self, after: int, file: str) -> None:
        self.after, self.file = after, file

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.file)
            trainer.should_stop = True


class Places:
    """A loader that goes on where it was."""

    def __init__(self, micros: Any) -> None:
        self.micros, self.at = micros, 0

    def __len__(self) -> int:
        return len(self.micros)

    def __iter__(self) -> Any:
        while self.at < len(self.micros):
            self.at += 1
            yield self.micros[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def fit(
    module: Given, micros: Any, steps: int, mode: str, *more: Callback, file: Any = None, **o: Any
) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    exact = ExactAccumulation(units=lambda batch: len(batch["y"]), **o) if mode == "ours" else None
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=steps,
        callbacks=[*([exact] if exact is not None else []), *more],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, Places(micros), ckpt_path=file, weights_only=False)


def run(
    model: Any, optimizer: Any, micros: Any, steps: int, loss: Any, mode: str, **o: Any
) -> None:
    """One epoch over these micro-batches."""
    fit(Given(model, optimizer, loss), micros, steps, mode, **o)


def resume(mode: str) -> nn.Module:
    """Two windows, left and gone on with in the middle of the second."""
    micros = laws.windows_of()[0]
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/window.ckpt"
        for last in (False, True):
            model = laws.model_of()
            module = Given(model, laws.sgd(model), laws.mean)
            more = [] if last else [Stop(6, file)]
            fit(module, micros, laws.STEPS, mode, *more, file=file if last else None)
    return model


def in_two(mode: Mode) -> Tensor:
    return from_two_processes("lightning", mode)


def rows() -> list[Row]:
    library = f"Lightning {__version__}"
    split = rows_of(library, train, flat(Reader()), in_two=in_two)
    return [*split, *laws.law_rows(library, run, resume)]
