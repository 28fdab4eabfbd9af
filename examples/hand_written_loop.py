"""The loop of most tutorials beside `wb.Accumulator`: masked tokens and a short last window.

    python examples/hand_written_loop.py

One epoch of ten micro-batches in windows of four: two full windows and one of two micro-batches.
Each micro-batch has another number of labels that count. The right weights are those after three
updates on the undivided windows, with the same clipping and learning rates.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import wholebatch as wb

Batch = dict[str, Tensor]
WORDS, STEPS, CLIP = 50, 4, 0.2


def tagger() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5)
    return nn.Sequential(*layers).double()


def sentences() -> list[Batch]:
    """Micro-batches of 8 sentences; label -100 does not count."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for _ in range(10):
        x = torch.randint(0, WORDS, (8, 16), generator=draw)
        lengths = torch.randint(1, 17, (8, 1), generator=draw)
        made.append({"x": x, "y": (x % 5).masked_fill(torch.arange(16) >= lengths, -100)})
    return made


def tools(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def before(model: nn.Module, loader: list[Batch]) -> None:
    optimizer, scheduler = tools(model)
    for i, batch in enumerate(loader):
        loss = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
        (loss / STEPS).backward()  # a mean of means
        if (i + 1) % STEPS == 0:  # the last two micro-batches make no update
            clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def after(model: nn.Module, loader: list[Batch]) -> None:
    optimizer, scheduler = tools(model)
    acc = wb.Accumulator(model, optimizer, steps=STEPS, clip_norm=CLIP, scheduler=scheduler)
    for batch in acc.over(loader):
        loss = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
        acc.backward(mean=loss, units=(batch["y"] != -100).sum())


def undivided(model: nn.Module, loader: list[Batch]) -> None:
    """Make the updates that both loops stand for: each window as one batch."""
    optimizer, scheduler = tools(model)
    for first in range(0, len(loader), STEPS):
        x, y = (torch.cat([one[name] for one in loader[first : first + STEPS]]) for name in "xy")
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def main() -> dict[str, float]:
    start, loader = tagger(), sentences()
    moved = {}
    for name, loop in (("undivided", undivided), ("before", before), ("after", after)):
        loop(model := copy.deepcopy(start), loader)
        moved[name] = parameters_to_vector(model.parameters()).detach()
    change = moved["undivided"] - parameters_to_vector(start.parameters()).detach()
    errors = {
        name: float((moved[name] - moved["undivided"]).norm() / change.norm())
        for name in ("before", "after")
    }
    print(
        f"Shown: after one epoch the change of the weights is off by {errors['before']:.0%} in the "
        f"usual loop, by {errors['after']:.0e} with wb.Accumulator."
    )
    return errors


if __name__ == "__main__":
    main()
