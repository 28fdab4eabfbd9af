"""Runs `wholebatch train` several times on the ranks of one job; each rank reports by itself.

FOLDER has recipes (`exact.py`, `noisy.py`, ...), and the run `from-one` of one process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from wholebatch.cli import main

CASES: dict[str, list[str]] = {
    # Of the case's name, what follows "/" is the folder that the run is written to.
    "on/from-one-ddp": ["--resume", "--updates", "6"],
    "tiny": ["exact.py", "--batch-size", "2", "--micro-batch", "1"],
    "held-out": ["held_out.py", "--updates", "1"],
    "straight": ["noisy.py"],
    "stop/stopped": ["noisy.py"],
    "again/stopped": ["--resume"],
    "straight-stream": ["stream.py"],
    "stop/stopped-stream": ["stream.py"],
    "again/stopped-stream": ["--resume"],
    "refused": ["exact.py", "--batch-size", "99"],
}


def run(case: str, arguments: list[str]) -> dict[str, Any]:
    action, _, folder = case.rpartition("/")
    if action == "stop" and dist.get_rank() == 1:
        os.environ["STOP_AT"] = "2"  # the second window; only this rank gets the signal
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["train", *arguments, "--out", folder])
    os.environ.pop("STOP_AT", None)
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        shutil.copytree("from-one", "from-one-ddp")
    dist.barrier()
    reports = {}
    for name, arguments in CASES.items():
        reports[name] = run(name, arguments)
        Path(f"report-{rank}.json").write_text(json.dumps(reports))
