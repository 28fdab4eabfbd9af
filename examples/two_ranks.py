"""Two ranks with different numbers of tokens: the update of one process on all of the data.

    torchrun --standalone --nproc-per-node 2 examples/two_ranks.py

The usual loop holds DDP's reduction back with `no_sync()`, divides by the number of micro-batches,
and lets DDP take the mean over the ranks: a mean of means of means. `wb.Accumulator` counts the
units of all ranks and divides once. It holds the reduction back by itself, and the ranks may have
different numbers of micro-batches.
"""

from __future__ import annotations

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import wholebatch as wb

Batch = dict[str, Tensor]
WORDS, STEPS = 50, 3


def tagger() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5)
    return nn.Sequential(*layers).double()


def sentences(rank: int) -> list[Batch]:
    """Three micro-batches of one rank; the sentences of rank 1 are shorter."""
    draw = torch.Generator().manual_seed(rank)
    made = []
    for size in (8, 8, 3):
        x = torch.randint(0, WORDS, (size, 16), generator=draw)
        lengths = torch.randint(1, 17 - 8 * rank, (size, 1), generator=draw)
        made.append({"x": x, "y": (x % 5).masked_fill(torch.arange(16) >= lengths, -100)})
    return made


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def before(model: DistributedDataParallel, micros: list[Batch]) -> None:
    optimizer = sgd(model)
    for i, batch in enumerate(micros):
        last = i + 1 == STEPS
        with contextlib.nullcontext() if last else model.no_sync():
            (mean_loss(model, batch) / STEPS).backward()
    optimizer.step()
    optimizer.zero_grad()


def after(model: DistributedDataParallel, micros: list[Batch]) -> None:
    acc = wb.Accumulator(model, sgd(model), steps=STEPS)
    for batch in acc.over(micros):
        acc.backward(mean=mean_loss(model, batch), units=(batch["y"] != -100).sum())


def undivided(model: nn.Module) -> None:
    """Make the update of one process that has the data of both ranks."""
    micros = [micro for rank in range(2) for micro in sentences(rank)]
    optimizer = sgd(model)
    mean_loss(model, {name: torch.cat([one[name] for one in micros]) for name in "xy"}).backward()
    optimizer.step()


def main() -> dict[str, float]:
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), parameters_to_vector(tagger().parameters()).detach()
    undivided(model := tagger())
    right = parameters_to_vector(model.parameters()).detach() - start
    errors = {}
    for name, loop in (("before", before), ("after", after)):
        loop(DistributedDataParallel(model := tagger()), sentences(rank))
        moved = parameters_to_vector(model.parameters()).detach() - start
        errors[name] = float((moved - right).norm() / right.norm())
    if rank == 0:
        print(
            f"Shown: the update on two ranks is off by {errors['before']:.0%} in the usual loop, "
            f"by {errors['after']:.0e} with wb.Accumulator."
        )
    dist.destroy_process_group()
    return errors


if __name__ == "__main__":
    if "RANK" not in os.environ:
        command = "torchrun --standalone --nproc-per-node 2 examples/two_ranks.py"
        sys.exit(f"run me with torchrun: {command}")
    main()
