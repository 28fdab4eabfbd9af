"""A pipeline of two stages: the update of the undivided batch on the whole model.

torchrun --standalone --nproc-per-node 2 examples/pipeline_stages.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.utils import parameters_to_vector

import wholebatch as wb


def parts() -> list[nn.Module]:
    """The modules of the two stages; a real model would build only its own."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
    last = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    return [first.double(), last.double()]


def main() -> float:
    dist.init_process_group("gloo")
    rank, mine = dist.get_rank(), parts()[dist.get_rank()]
    x, y = torch.randn(21, 8).double(), torch.arange(21) % 3
    start = parameters_to_vector(mine.parameters()).detach().clone()

    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    train = wb.Pipeline(stage, optimizer, loss=wb.cross_entropy, micro_batch=4)
    train.step(x, target=y)  # 21 samples in micro-batches of 4: the last one is padded

    whole = nn.Sequential(*parts())
    undivided = torch.optim.SGD(whole.parameters(), lr=0.1)
    nn.functional.cross_entropy(whole(x), y).backward()
    undivided.step()
    right = parameters_to_vector(whole[rank].parameters()).detach() - start
    moved = parameters_to_vector(mine.parameters()).detach() - start
    off = float((moved - right).norm() / right.norm())
    if rank == 1:
        print(f"Shown: the update of the second stage is {off:.0e} off.")
    dist.destroy_process_group()
    return off


if __name__ == "__main__":
    if "RANK" not in os.environ:
        command = "torchrun --standalone --nproc-per-node 2 examples/pipeline_stages.py"
        sys.exit(f"run me with torchrun: {command}")
    main()
