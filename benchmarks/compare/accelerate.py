"""Accelerate's loop, as its documentation has it, with and without wholebatch."""

from __future__ import annotations

import torch
from accelerate import Accelerator, __version__
from accelerate.state import AcceleratorState, GradientState
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
from wholebatch.integrations.accelerate import AccelerateAccumulator


def train(problem: Problem, mode: Mode) -> Tensor:
    """One epoch of Accelerate's loop."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    size, steps = problem.batches(mode)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(Tokens(problem), batch_size=size)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    windows = AccelerateAccumulator(accelerator, prepared, optimizer) if mode == "ours" else None
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = loss_of(prepared(batch["input_ids"]), batch["labels"])
            if windows is not None:
                windows.backward(mean=loss, units=counted(batch["labels"]))
            else:
                accelerator.backward(loss)
            if accelerator.sync_gradients and problem.clip_norm is not None:
                accelerator.clip_grad_norm_(prepared.parameters(), problem.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def rows() -> list[Row]:
    return rows_of("Accelerate", __version__, train, flat(Reader()))
