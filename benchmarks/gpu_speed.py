"""Time wholebatch beside its peers on one CUDA device, on the same models and data, in one run.

    python benchmarks/gpu_speed.py                        # the rows of docs/benchmarks/speed.md
    python benchmarks/gpu_speed.py --rows gpt-124m/whole/4 gpt-124m/loop+/64
    python benchmarks/gpu_speed.py --keep                 # measure what speed.json does not have
    python benchmarks/gpu_speed.py --rows gpt-tiny/whole/2 gpt-tiny/loop/2 --execute eager --out DIR

A row is a model, a loop and a micro-batch size; with the size of the window it is not divided.
Every row runs in a process of its own, so that device memory is its own. A few get ready (import,
compile, record) side by side; while one is timed, all others are stopped. Rows come in the order of
their importance; one that would not end within the budget is not begun. Results are written as they
come, to speed.json and speed.md; a row that fails says why and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from speed.together import Child, Expected, Spec, run_rows  # noqa: E402

PEERS = ["loop", "trainer", "lightning", "accelerate"]
MAIN: list[Spec] = [
    *(("gpt-124m", "whole", size) for size in (4, 8, 1)),
    ("gpt-124m", "loop+", 64),
    *(("gpt-1.3b", "whole", size) for size in (4, 1)),
    *(("resnet-50", "whole", size) for size in (32, 8)),
    ("gpt-1.3b", "loop+", 32),
    *(("encoder", "whole", size) for size in (16, 4)),
    *(("gpt-124m", loop, size) for size in (4, 1) for loop in PEERS),
    ("gpt-124m", "loop+", 4),
    *(("gpt-1.3b", loop, size) for size in (4, 1) for loop in PEERS),
    *(("resnet-50", loop, size) for size in (32, 8) for loop in PEERS),
    *(("encoder", loop, size) for size in (16, 4) for loop in PEERS),
    ("gpt-1.3b", "loop+", 4),
]
# Of earlier runs on an H200, a little rounded up: they decide what is prepared beside what.
GIB = {"gpt-124m": 9.0, "gpt-1.3b": 38.0, "resnet-50": 8.0, "encoder": 15.0}
GIB |= {"llama": 9.0, "llama-1b": 35.0, "qwen2": 16.0, "lora": 20.0}
UNDIVIDED_GIB = {("gpt-124m", 64): 62.0, ("gpt-1.3b", 32): 95.0}
UNDIVIDED_GIB |= {("llama", 64): 42.0, ("llama-1b", 32): 78.0}
COMPILING = {"gpt-124m": 45.0, "gpt-1.3b": 80.0, "resnet-50": 75.0, "encoder": 110.0}


def expected(spec: Spec) -> Expected:
    """Return the seconds and GiB that a row takes by itself."""
    model, loop, micro = spec
    gib = UNDIVIDED_GIB.get((model, micro), GIB.get(model, 0.0))
    return Expected(
        15.0 + (COMPILING.get(model, 40.0) if loop in ("whole", "loop+") else 15.0), gib
    )


def child(spec: Spec, execute: str) -> None:
    """Measure one row in this process, print it, and end at once."""
    from speed.loops import LOOPS, Job
    from speed.models import CASES

    model, loop, micro = spec
    found: dict[str, object] = {"model": model, "loop": loop, "micro": micro}
    job = Job(CASES[model], micro, execute, waits=True)
    try:
        LOOPS[loop][1](job)
        found["ms"], found["gib"] = job.found()
    except Exception as problem:
        traceback.print_exc()
        first = (str(problem).splitlines() or ["no message"])[0]
        found["error"] = f"{type(problem).__name__}: {first[:300]}"
    print(f"ROW {json.dumps(found)}", flush=True)
    os._exit(0)  # Nobody needs the memory to be freed tidily.


def spec_of(row: str) -> Spec:
    model, loop, micro = row.split("/")
    return model, loop, int(micro)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", help="model/loop/size each; those of the page if none")
    parser.add_argument("--keep", action="store_true", help="leave out rows that have a time")
    parser.add_argument("--execute", default="graph", help="of WholeBatch")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds in all")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(spec_of(options.child), options.execute)

    from speed.table import Results

    began, results = time.monotonic(), Results(options.out)
    specs = [spec_of(row) for row in options.rows] if options.rows else MAIN
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    run_rows(
        [spec for spec in specs if not (options.keep and results.has(spec))],
        lambda spec, gib: Child(
            Path(__file__).resolve(),
            spec,
            ["--execute", options.execute],
            os.pathsep.join(paths),
            gib,
        ),
        expected,
        until=began + options.budget,
        report=results.add,
    )
    print(results.markdown())
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
