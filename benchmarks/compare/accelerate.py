"""Accelerate's loop, as its documentation has it, with and without wholebatch."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from accelerate import Accelerator, __version__
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader

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
from wholebatch.integrations.accelerate import AccelerateAccumulator

LAUNCH: tuple[str, ...] = (
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes=2",
    "--num_machines=1",
)
LAUNCH += ("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0")


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


class Loop:
    """Accelerate's loop over micro-batches that are given."""

    def __init__(self, model: nn.Module, optimizer: Any, micros: Any, steps: int) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, optimizer, DataLoader(micros, batch_size=None)
        )
        self.windows: AccelerateAccumulator | None = None

    def step(self, micro: Any, loss: Any) -> None:
        with self.accelerator.accumulate(self.model):
            mean = loss(self.model, micro)
            if self.windows is not None:
                self.windows.backward(mean=mean, units=len(micro["y"]))
            else:
                self.accelerator.backward(mean)
            self.optimizer.step()
            self.optimizer.zero_grad()


def run(
    model: Any, optimizer: Any, micros: Any, steps: int, loss: Any, mode: str, **o: Any
) -> None:
    """One epoch over these micro-batches."""
    loop = Loop(model, optimizer, micros, steps)
    if mode == "ours":
        loop.windows = AccelerateAccumulator(loop.accelerator, loop.model, loop.optimizer, **o)
    for micro in loop.loader:
        loop.step(micro, loss)


def resume(mode: str) -> nn.Module:
    """Two windows, left and gone on with in the middle of the second."""

    def part(folder: str, places: range, *, load: bool) -> nn.Module:
        model = laws.model_of()
        loop = Loop(model, laws.sgd(model), laws.windows_of()[0], laws.STEPS)
        if mode == "ours":
            loop.windows = AccelerateAccumulator(loop.accelerator, loop.model, loop.optimizer)
            loop.accelerator.register_for_checkpointing(loop.windows)
        if load:
            loop.accelerator.load_state(folder)
        for place, micro in enumerate(loop.loader):
            if place in places:
                loop.step(micro, laws.mean)
            if place + 1 == places.stop:
                loop.accelerator.save_state(folder)
                break
        return model

    with tempfile.TemporaryDirectory() as folder:
        part(folder, range(6), load=False)
        return part(folder, range(6, 8), load=True)


def in_two(mode: Mode) -> Tensor:
    return from_two_processes("accelerate", mode, launcher=LAUNCH)


def rows() -> list[Row]:
    library = f"Accelerate {__version__}"
    split = rows_of(library, train, flat(Reader()), in_two=in_two)
    return [*split, *laws.law_rows(library, run, resume)]
