"""Times wholebatch beside its peers on one CUDA device, on the same models and data, in one run.

    python benchmarks/gpu_speed.py                                  # everything (long)
    python benchmarks/gpu_speed.py --models gpt-124m --micro 1 4    # a part of it
    python benchmarks/gpu_speed.py --quick                          # one small table
    python benchmarks/gpu_speed.py --main                           # the main rows in 8 minutes
    python benchmarks/gpu_speed.py --models gpt-cpu --name speed-cpu   # a small one, on a CPU
    python benchmarks/gpu_speed.py --tables                         # speed.md from speed.json again

Every loop runs in a process of its own, so that device memory is its own. `--together N` lets N of
them warm up (import, compile, record) side by side; each is timed while all others wait. Results
are written as they come, to docs/benchmarks/speed.json and speed.md (and plots, where matplotlib is
installed); a row that fails says why and does not stop the others. Rows of an earlier run with
other models, modes or sizes are kept, rows of the same name are replaced.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "gpt-124m": [1, 4, 8],
    "gpt-1.3b": [1, 4],
    "resnet-50": [8, 32],
    "encoder": [4, 16],
    "gpt-cpu": [1, 4],
}
WHOLE = "whole batch, compiled"
MODES = [
    "wholebatch graph",
    "loop",
    "loop + torch.compile",
    WHOLE,
    "HF Trainer",
    "Lightning",
    "Accelerate",
    "Fabric",
    "wholebatch compile",
    "wholebatch eager",
]
PEERS = ["loop", "HF Trainer", "Lightning", "Accelerate"]
MAIN: list[list[tuple[str, str, int]]] = [
    [
        *(("gpt-124m", "wholebatch graph", size) for size in (8, 4, 1)),
        ("gpt-124m", "loop + torch.compile", 4),
        ("gpt-1.3b", "wholebatch graph", 4),
        *(("resnet-50", "wholebatch graph", size) for size in (32, 8)),
        *(("encoder", "wholebatch graph", size) for size in (16, 4)),
    ],
    [
        ("gpt-124m", WHOLE, 0),
        ("gpt-1.3b", "wholebatch graph", 1),
        *(("gpt-124m", mode, 4) for mode in PEERS),
        *(("gpt-124m", mode, 1) for mode in PEERS),
    ],
    [("gpt-1.3b", WHOLE, 0), ("gpt-1.3b", "loop + torch.compile", 4)],
    [("gpt-1.3b", mode, size) for size in (4, 1) for mode in ("loop", "Lightning")],
    [
        ("gpt-1.3b", "HF Trainer", 4),
        *(("resnet-50", mode, size) for size in (32, 8) for mode in PEERS),
        ("resnet-50", "loop + torch.compile", 32),
        *(("encoder", mode, size) for size in (16, 4) for mode in PEERS),
        ("encoder", "loop + torch.compile", 16),
    ],
]
"""Batches of rows; the rows of a batch are in device memory at the same time (139 GiB)."""


def child(options: argparse.Namespace) -> None:
    """One row, in this process."""
    from speed.measure import matmul_peak, row

    if options.child == "peak":
        print(f"PEAK {matmul_peak()}", flush=True)
    else:
        row(
            options.models[0],
            options.child,
            options.micro[0],
            options.windows,
            options.seconds,
            profiled=options.profile and options.child in ("wholebatch graph", "loop", WHOLE),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=list(SIZES)[:4])
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--micro", nargs="+", type=int)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=4.0, help="of timed windows, at most")
    parser.add_argument("--warm-up", type=float, default=240.0, help="seconds for a batch of rows")
    parser.add_argument("--budget", type=float, default=7200.0, help="seconds in all")
    parser.add_argument("--together", type=int, default=1, help="rows that warm up side by side")
    parser.add_argument("--quick", action="store_true", help="gpt-124m at 4, ours and two loops")
    parser.add_argument("--main", action="store_true", help="the main rows, warmed up together")
    parser.add_argument("--batches", nargs="+", type=int, help="only these batches of --main")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="and profile one window of ours, the loop and the whole batch",
    )
    parser.add_argument("--tables", action="store_true", help="only write speed.md from speed.json")
    parser.add_argument("--name", default="speed", help="of the files that are written")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return 0

    from speed.measure import matmul_peak
    from speed.table import Results
    from speed.together import Spec, run_together

    if options.tables:
        Results(options.out, name=options.name, measuring=False).write()
        return 0
    began = time.monotonic()
    batches: list[list[Spec]] = [list(batch) for batch in MAIN]
    if options.quick:
        options.models, options.micro, options.modes = ["gpt-124m"], [4], MODES[:3]
    if options.rows:
        parts = [row.split("/") for row in options.rows]
        batches = [[(model, mode, int(size)) for model, mode, size in parts]]
    if options.batches:
        batches = [batches[index] for index in options.batches]
    if not options.main and not options.rows:
        specs: list[Spec] = []
        for model in options.models:
            for mode in options.modes:
                sizes = [0] if mode == WHOLE else options.micro or SIZES[model]
                specs += [(model, mode, size) for size in sizes]
        step = options.together
        batches = [specs[start : start + step] for start in range(0, len(specs), step)]

    results = Results(options.out, name=options.name)
    results.peak(matmul_peak())
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    for batch in batches:
        if time.monotonic() - began > options.budget - 20:
            print(f"no time left for {batch}", flush=True)
            continue
        run_together(
            Path(__file__).resolve(),
            batch,
            [
                *("--windows", str(options.windows), "--seconds", str(options.seconds)),
                *(["--profile"] if options.profile else []),
            ],
            os.pathsep.join(paths),
            until=began + options.budget,
            warm_up=options.warm_up,
            report=results.add,
        )
        print(f"after {time.monotonic() - began:.0f} s", flush=True)
    print(results.markdown())
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
