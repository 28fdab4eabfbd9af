"""Speed and memory of each trainer, with and without wholebatch.

    python benchmarks/gpu_trainers.py                                   # all rows, on a CUDA device
    python benchmarks/gpu_trainers.py --rows llama/4 --trainers trainer,exact --budget 300
    python benchmarks/gpu_trainers.py --rows tiny/2 --execute eager  # a small model, on a CPU too
    python benchmarks/gpu_trainers.py --rows llama/64 --trainers loop+   # the undivided batch

Models of Transformers under bf16 autocast (in float32 on a CPU), fused AdamW, clipped by norm, on
sequences of one length, without logging and saving. Windows are measured after the first few, which
trace and compile; the median counts, by the device's clock and without waiting in between. GiB are
what is reserved on the device at the end, the memory of recorded graphs with it. (The windows 2, 4,
8, ... of wholebatch also run eager code, and need its memory.) Packages that are missing are named
and their rows left out. Everything runs in one process, one trainer after the other, each with a
fresh model.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
import warnings

import torch
from speed.loops import LOOPS, Job
from speed.models import CASES

from wholebatch.compile import ExecuteWarning


def measured(row: str, name: str, execute: str, seconds: float) -> str:
    """Return ms per window and GiB as cells of the table, or why there are none."""
    model, micro = row.split("/")
    job = Job(CASES[model], int(micro), execute, seconds)
    try:
        LOOPS[name][1](job)
        ms, gib = job.found()
        return f"{ms:.1f} | {gib:.2f}"
    except Exception as problem:  # The other trainers are still measured.
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]} |"
    finally:
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="llama/4,llama/1", help=f"of {', '.join(CASES)}, /size")
    parser.add_argument("--trainers", default=",".join(LOOPS), help=f"of {', '.join(LOOPS)}")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--execute", default="graph", help="of the entry points of wholebatch")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", ExecuteWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    todo = [(row, name) for row in options.rows.split(",") for name in options.trainers.split(",")]
    ends, lines = time.perf_counter() + options.budget, list[str]()
    for place, (row, name) in enumerate(todo):
        left = ends - time.perf_counter()
        found = "no time left |"
        if left > 0:
            seconds = left / (len(todo) - place)
            found = measured(row, name, options.execute, seconds)
        lines.append(f"| {row} | {LOOPS[name][0]} | {found} |")
        print(lines[-1], flush=True)
    print("\n| model, micro | trainer | ms per window | GiB |\n|---|---|---:|---:|")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
