"""A loop over Lightning's Fabric, as its documentation has it, with and without wholebatch."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from lightning import __version__
from lightning.fabric import Fabric
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


def steps_of(loop: Any, micros: Any, places: range, steps: int, loss: Any) -> None:
    """The loop's body, for these micro-batches of an epoch."""
    fabric, model, optimizer, windows = loop
    for place in places:
        micro, last = micros[place], (place + 1) % steps == 0 or place + 1 == len(micros)
        if windows is not None:
            windows.backward(mean=loss(model, micro), units=len(micro["y"]), last=last)
        else:
            fabric.backward(loss(model, micro) / steps)
        if last:
            optimizer.step()
            optimizer.zero_grad()


def loop_of(inner: Any, optimizer: Any, mode: str, **options: Any) -> Any:
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(inner, optimizer)
    windows = FabricAccumulator(fabric, model, optimizer, **options) if mode == "ours" else None
    return fabric, model, optimizer, windows


def run(
    model: Any, optimizer: Any, micros: Any, steps: int, loss: Any, mode: str, **o: Any
) -> None:
    """One epoch over these micro-batches."""
    loop = loop_of(model, optimizer, mode, **o)
    steps_of(loop, micros, range(len(micros)), steps, loss)


def resume(mode: str) -> nn.Module:
    """Two windows, left and gone on with in the middle of the second."""
    micros = laws.windows_of()[0]

    def begun() -> tuple[nn.Module, Any, dict[str, Any]]:
        inner = laws.model_of()
        loop = loop_of(inner, laws.sgd(inner), mode)
        windows = {} if loop[3] is None else {"windows": loop[3]}
        return inner, loop, {"model": loop[1], "optimizer": loop[2], **windows}

    with tempfile.TemporaryDirectory() as folder:
        _, loop, state = begun()
        steps_of(loop, micros, range(6), laws.STEPS, laws.mean)
        loop[0].save(f"{folder}/state", state)
        inner, loop, state = begun()
        loop[0].load(f"{folder}/state", state)
    steps_of(loop, micros, range(6, 8), laws.STEPS, laws.mean)
    return inner


def in_two(mode: Mode) -> Tensor:
    return from_two_processes("fabric", mode)


def rows() -> list[Row]:
    library = f"Fabric {__version__}"
    split = rows_of(library, train, flat(Reader()), in_two=in_two)
    return [*split, *laws.law_rows(library, run, resume)]
