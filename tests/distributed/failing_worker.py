"""One rank of two, without an agent that would kill the other: one of them fails."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import wholebatch as wb
from tests.distributed.exact_worker import wrapped
from tests.distributed.problem import loss, micro
from tests.support import sgd


def main() -> None:
    engine, how, when = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    model = wrapped(engine)
    acc = wb.Accumulator(model, sgd(model), steps=2)
    for i, m in enumerate(acc.over([micro(10 * rank + i, 2) for i in range(6)])):
        if i == 3 and rank == int(how[-1]):
            Path(when).write_text(repr(time.time()))  # from here on the other one waits
            if how.startswith("raises"):
                raise ValueError("sample 17 is broken")
            if how.startswith("leaves"):
                break
            os._exit(9)  # "dies": killed, with no chance to say anything
        acc.backward(loss(model, m))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
