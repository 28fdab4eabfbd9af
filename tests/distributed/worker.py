"""Run under torchrun: what the named modules of this folder report, in one job.

Starting processes takes longer than most cases. Every rank reports; rank 0 writes all reports.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import warnings
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    faulthandler.dump_traceback_later(280, exit=True)  # a hang shows where
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    report = {name: import_module(f"tests.distributed.{name}").report() for name in sys.argv[2:]}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, report)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(everyones, file)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
