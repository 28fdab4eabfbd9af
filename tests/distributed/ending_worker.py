"""Trains on two ranks until rank 1 dies or hangs in the middle of its second window."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.distributed.process_group import shorten_timeout


def main(how: str, note: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(3, 2))
    acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    for number in range(8):
        if number == 3 and rank == 1:
            note.write_text(str(time.time()))
            if how == "dies":
                os._exit(3)
            time.sleep(1000)
        step = acc.backward(model(torch.randn(4, 3)).square().sum(), units=4)
        if step is not None and step.update == 1:
            shorten_timeout(6.0)


main(sys.argv[1], Path(sys.argv[2]))
