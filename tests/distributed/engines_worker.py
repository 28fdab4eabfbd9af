"""Runs `wholebatch train --parallel deepspeed|pipeline` on the ranks of one job.

FOLDER has the recipes; each rank reports by itself what every run ended with.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from tests.distributed.train_worker import run

PIPELINE = ["--parallel", "pipeline"]
ZERO = ["--parallel", "deepspeed", "--zero"]
CASES: dict[str, list[str]] = {
    # Of the case's name, what follows "/" is the folder that the run is written to.
    "1f1b": ["layers.py", *PIPELINE],
    "gpipe": ["layers.py", *PIPELINE, "--schedule", "gpipe"],
    "interleaved": ["layers.py", *PIPELINE, "--schedule", "interleaved"],
    "half": ["layers.py", *PIPELINE, "--steps", "2"],
    "on/half": ["--resume", *PIPELINE, "--steps", "4"],
    "on/from-one": ["--resume", *PIPELINE, "--steps", "4"],
    "uncut": ["uncut.py", *PIPELINE],
    "tied": ["tied.py", *PIPELINE],
    "tokens": ["layers.py", *PIPELINE, "--micro-batch", "auto"],
}
DEEPSPEED: dict[str, list[str]] = {
    "zero1": ["single.py", *ZERO, "1"],
    "zero3": ["single.py", *ZERO, "3"],
    "half-zero2": ["single.py", *ZERO, "2", "--steps", "2"],
    "on/half-zero2": ["--resume", *ZERO, "2", "--steps", "4"],
    "straight-zero2": ["single.py", *ZERO, "2"],
    "other/half-zero2": ["--resume", "--steps", "6"],
}

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    os.environ["DS_ACCELERATOR"] = "cpu"
    if sys.argv[2] == "deepspeed":
        import deepspeed

        # DeepSpeed compiles a collective of its own that waits by spinning: many times slower than
        # gloo where other processes want the core too.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    for name, arguments in (DEEPSPEED if sys.argv[2] == "deepspeed" else CASES).items():
        found[name] = run(name, arguments)
        Path(f"{sys.argv[2]}-{rank}.json").write_text(json.dumps(found))
