"""Times wholebatch beside its peers on one device, on the same models and data, in one run.

    python benchmarks/gpu_speed.py --main --budget 560    # on CUDA, as far as the time goes
    python benchmarks/gpu_speed.py --main --merge docs/benchmarks/speed.json   # what is missing
    python benchmarks/gpu_speed.py --main --plan          # the rows and their seconds, nothing runs
    python benchmarks/gpu_speed.py --rows "gpt-124m/loop/4" "gpt-124m/whole batch, compiled/0"
    python benchmarks/gpu_speed.py --cpu                  # a small GPT, on two cores (make bench)
    python benchmarks/gpu_speed.py --tables --merge FILE  # speed.md again, with another run's rows

Every loop runs in a process of its own, so that device memory is its own. A few get ready (import,
compile, record) side by side; while one is timed, all others are stopped. Rows come in the order of
their importance; one that would not end within the budget is not begun. Results are written as they
come, to docs/benchmarks/speed.json and speed.md (and plots at the end or by --tables); a row that
fails says why and does not stop the others. `--merge` takes over the rows of other files
first; those that have a time are not measured again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODES = [
    "wholebatch graph",
    "loop",
    "loop + torch.compile",
    "whole batch, compiled",
    "HF Trainer",
    "Lightning",
    "Accelerate",
    "Fabric",
    "wholebatch compile",
    "wholebatch eager",
]
CPU_MODES = [
    "wholebatch eager",
    "loop",
    "Accelerate",
    "Lightning",
    "HF Trainer",
]
CPU_COMPILED = ["wholebatch compile", "loop + torch.compile"]


def child(options: argparse.Namespace) -> None:
    """One row, in this process."""
    from speed.measure import row

    row(
        options.models[0],
        options.child,
        options.micro[0],
        options.windows,
        options.seconds,
        profiled=options.profile
        and options.child.startswith(("wholebatch graph", "loop", "whole")),
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_argument_group("which rows")
    what.add_argument("--main", action="store_true", help="those of the documentation (CUDA)")
    what.add_argument("--cpu", action="store_true", help="a small GPT in fp32, taking turns")
    what.add_argument("--rows", nargs="+", help="model/mode/size each; size 0: the whole batch")
    what.add_argument("--models", nargs="+", help="all modes and sizes of these models")
    what.add_argument("--modes", nargs="+", default=MODES)
    what.add_argument("--micro", nargs="+", type=int)
    how = parser.add_argument_group("how")
    how.add_argument("--windows", type=int, default=24, help="timed of a row, at most (in a turn)")
    how.add_argument("--seconds", type=float, default=3.0, help="of timed windows, at most")
    how.add_argument("--rounds", type=int, default=1, help="turns that all rows take")
    how.add_argument("--together", type=int, default=4, help="rows that get ready side by side")
    how.add_argument("--warm-up", type=float, default=200.0, help="seconds to get ready, at most")
    how.add_argument("--budget", type=float, default=560.0, help="seconds in all")
    how.add_argument("--profile", action="store_true", help="and profile one window (ours, loops)")
    how.add_argument("--plan", action="store_true", help="only say what would be measured")
    how.add_argument("--tables", action="store_true", help="only write the page from the results")
    how.add_argument("--merge", nargs="+", type=Path, default=[], help="results to begin from")
    how.add_argument("--name", default="speed", help="of the files that are written")
    how.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    how.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cpu:
        options.name = "speed-cpu" if options.name == "speed" else options.name
        options.rounds, options.together, options.seconds = max(options.rounds, 9), 2, 0.0
        options.budget = min(options.budget, 560.0)
    return options


def chosen(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """The rows that were asked for, the most important first."""
    from speed.plan import MAIN, SIZES, WHOLE

    if options.rows:
        parts = [row.rsplit("/", 1) for row in options.rows]
        named = [(*name.split("/", 1), int(size)) for name, size in parts]
        return [(model, mode, size) for model, mode, size in named]
    if options.cpu:
        model = "gpt-cpu"
        return [
            *((model, mode, size) for size in SIZES[model] for mode in CPU_MODES),
            *((model, mode, SIZES[model][-1]) for mode in CPU_COMPILED),
            (model, "whole batch", 0),
            (model, WHOLE, 0),
        ]
    if options.main or not options.models:
        return MAIN
    return [
        (model, mode, size)
        for model in options.models
        for mode in options.modes
        for size in ([0] if mode == WHOLE else options.micro or SIZES[model])
    ]


def main() -> int:
    options = read_options()
    if options.child:
        child(options)
        return 0

    from speed.plan import expected

    specs = chosen(options)
    if options.plan:
        for spec in specs:
            what = expected(spec, options.seconds)
            print(f"{what.seconds:5.0f} s {what.gib:5.0f} GiB  {'/'.join(map(str, spec))}")
        alone = sum(expected(spec, options.seconds).seconds for spec in specs)
        timed = len(specs) * (options.seconds + 2.0)
        print(f"{alone:.0f} s one after the other; with {options.together} together about")
        print(f"{timed + (alone - timed) / options.together:.0f} s")
        return 0

    from speed.measure import matmul_peak
    from speed.table import Results
    from speed.together import Child, run_rows

    began = time.monotonic()
    results = Results(
        options.out, name=options.name, measuring=not options.tables, merged=options.merge
    )
    if options.tables:
        results.write()
        results.plot()
        return 0
    results.peak(matmul_peak())
    specs = [spec for spec in specs if not (options.merge and results.has(spec))]
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    of_children = [
        *("--windows", str(options.windows), "--seconds", str(options.seconds)),
        *(["--profile"] if options.profile else []),
    ]
    run_rows(
        specs,
        lambda spec, gib: Child(
            Path(__file__).resolve(), spec, of_children, os.pathsep.join(paths), gib
        ),
        lambda spec: expected(spec, options.seconds),
        until=began + options.budget,
        together=options.together,
        warm_up=options.warm_up,
        rounds=options.rounds,
        report=results.add,
    )
    results.plot()
    print(results.markdown())
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
