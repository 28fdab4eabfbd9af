"""A loop over Lightning's Fabric, as its documentation has it, with and without wholebatch."""

from __future__ import annotations

import torch
from lightning import __version__
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

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
from wholebatch.integrations.lightning import FabricAccumulator


def train(problem: Problem, mode: Mode) -> Tensor:
    """One epoch of a loop over Fabric."""
    size, steps = problem.batches(mode)
    several = problem.ranks > 1 and mode != "whole"
    fabric = Fabric(
        accelerator="cpu",
        strategy="ddp" if several else "auto",
        devices=problem.ranks if several else 1,  # "64-true" would give logits in float32
    )
    fabric.launch()
    inner = Reader()
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=LEARNING_RATE))
    loader = fabric.setup_dataloaders(DataLoader(Tokens(problem), batch_size=size))
    windows = FabricAccumulator(fabric, model, optimizer) if mode == "ours" else None
    for index, batch in enumerate(loader):
        last = (index + 1) % steps == 0 or index + 1 == len(loader)
        with fabric.no_backward_sync(model, enabled=not last):
            loss = loss_of(model(batch["input_ids"]), batch["labels"])
            if windows is not None:
                windows.backward(mean=loss, units=counted(batch["labels"]), last=last)
            else:
                fabric.backward(loss / steps)
        if last:
            if problem.clip_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=problem.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return flat(inner)


def rows() -> list[Row]:
    return rows_of("Fabric", __version__, train, flat(Reader()))
