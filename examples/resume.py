"""Stop a run in the middle of an epoch and go on: the usual loop beside `wb.Accumulator`.

    python examples/resume.py

Ten micro-batches in windows of four. Both loops save a checkpoint after six of them and start again
from it in a new model. The usual loop saves in the middle of a window and loses the gradients that
it has added up. `wb.Accumulator` saves between windows. Its state holds the place in the loader.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import wholebatch as wb

Batch = dict[str, Tensor]
STEPS, STOPPED = 4, 6


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5)).double()


def loader() -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    sizes = (8, 8, 8, 3, 8, 8, 5, 8, 8, 2)
    return [
        {
            "x": torch.randn(size, 16, generator=draw, dtype=torch.float64),
            "y": torch.randint(0, 5, (size,), generator=draw),
        }
        for size in sizes
    ]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def before(file: Path, *, stops: bool) -> nn.Module:
    """Train by the usual loop, from the checkpoint if there is one."""
    model = classifier()
    optimizer = adam(model)
    first = 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["micro_batches"]
    micros = loader()
    for i in range(first, len(micros)):
        batch = micros[i]
        (F.cross_entropy(model(batch["x"]), batch["y"]) / STEPS).backward()
        if (i + 1) % STEPS == 0 or i + 1 == len(micros):
            optimizer.step()
            optimizer.zero_grad()
        if stops and i + 1 == STOPPED:  # the gradients of two micro-batches are not in the file
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "micro_batches": i + 1}, file)
            break
    return model


def after(file: Path, *, stops: bool) -> nn.Module:
    """Train by `wb.Accumulator`, from the checkpoint if there is one."""
    model = classifier()
    optimizer = adam(model)
    acc = wb.Accumulator(model, optimizer, steps=STEPS)
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        acc.load_state_dict(saved["windows"])
    for i, batch in enumerate(acc.over(loader())):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        step = acc.backward(mean=loss, units=len(batch["y"]))
        if step is not None:  # a window is complete: the place to save
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "windows": acc.state_dict()}, file)
        if stops and i + 1 == STOPPED:  # two micro-batches of an open window are computed again
            acc.discard()
            break
    return model


def main() -> dict[str, float]:
    errors = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, loop in (("before", before), ("after", after)):
            start = parameters_to_vector(classifier().parameters()).detach()
            whole = loop(Path(folder) / f"{name} at once", stops=False)
            loop(Path(folder) / name, stops=True)
            resumed = loop(Path(folder) / name, stops=False)
            right = parameters_to_vector(whole.parameters()).detach() - start
            found = parameters_to_vector(resumed.parameters()).detach() - start
            errors[name] = float((found - right).norm() / right.norm())
    print(
        f"Shown: a resumed run is off by {errors['before']:.0%} in the usual loop, by "
        f"{errors['after']:.0e} with wb.Accumulator."
    )
    return errors


if __name__ == "__main__":
    main()
