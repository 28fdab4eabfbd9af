"""Measure what each rewrite of the compiled graph buys: one is switched off at a time.

    python benchmarks/gpu_techniques.py                       # on CUDA; prints the table
    python benchmarks/gpu_techniques.py --rows "llama-12/without products in place/4"
    python benchmarks/gpu_techniques.py --tiny --rows "llama-12/all/4"    # tries it out on a CPU
    python benchmarks/gpu_techniques.py --page                # also writes the page

The numbers are milliseconds of a window, with the update. Every row runs in a process of its own.
Several get ready side by side; while one is timed, the others are stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "internals" / "rewrites.md"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from speed.together import Child, Expected, Spec, run_rows  # noqa: E402

MODELS = {
    "llama-12": "llama 12x768 micro 4",
    "llama-22": "llama 22x2048 micro 4",
    "t5": "t5-base micro 4",
    "mixtral": "mixtral",
}
ALL = "all"


def _without(name: str) -> Callable[[], None]:
    """Leave out an option of the rewrite."""

    def switch_off() -> None:
        from wholebatch.compile import joint_graph

        module: Any = joint_graph
        rewritten = module.rewrite

        def fewer(*given: Any, **options: bool) -> Any:
            return rewritten(*given, **{**options, name: False})

        module.rewrite = fewer

    return switch_off


def _without_choice(name: str) -> Callable[[], None]:
    """Leave a decision of Inductor to Inductor."""

    def switch_off() -> None:
        from wholebatch.compile import inductor

        setattr(inductor, name, nullcontext)

    return switch_off


def _without_merging() -> None:
    from wholebatch.compile import graph_rewrite

    graph_rewrite._merge_equal = lambda *_: None


def _without_embeddings() -> None:
    from wholebatch.compile import graph_rewrite

    graph_rewrite._Adder._rows = lambda *_: False  # type: ignore[method-assign]


def _without_attention() -> None:
    from wholebatch.compile import trace, traced_attention

    setattr(trace, "attention", traced_attention._ATTENTION)  # noqa: B010


WAYS: Mapping[str, Callable[[], None]] = {
    ALL: lambda: None,
    "without shared inputs": _without("shares"),
    "without writing parts in place": _without_choice("_parts_written_in_place"),
    "without products in place": _without("products"),
    "without embeddings in place": _without_embeddings,
    "without merging equal operations": _without_merging,
    "without causal attention": _without_attention,
}
"""What each row switches off, the most doubtful first."""
EVERYWHERE = (ALL, "without shared inputs", "without writing parts in place")
SPECS: list[Spec] = [
    *((model, way, 4) for way in EVERYWHERE for model in MODELS),
    *(("llama-12", way, 1) for way in EVERYWHERE),
    *((model, way, 4) for model in MODELS for way in WAYS if way not in EVERYWHERE),
    *(
        (model, way, 1)
        for model in MODELS
        for way in WAYS
        if not (model == "llama-12" and way in EVERYWHERE)
    ),
]
"""The rows, in the order of their importance."""


def expected(spec: Spec) -> Expected:
    """Return the seconds and GiB that a row takes by itself."""
    return Expected(50.0, 30.0) if spec[0] == "llama-22" else Expected(40.0, 9.0)


def child(spec: Spec, *, tiny: bool) -> None:
    """Measure one row in this process, print it, and end at once."""
    model, way, micro = spec
    row: dict[str, Any] = {"model": model, "loop": way, "micro": micro}
    try:
        WAYS[way]()
        row |= measured(MODELS[model], micro, tiny=tiny)
    except Exception as problem:
        traceback.print_exc()
        first = (str(problem).splitlines() or ["no message"])[0]
        row["error"] = f"{type(problem).__name__}: {first[:200]}"
    print(f"ROW {json.dumps(row)}", flush=True)
    os._exit(0)  # Nobody needs the memory to be freed tidily.


def measured(name: str, micro: int, *, tiny: bool) -> dict[str, Any]:
    """Return the milliseconds of a window, and how it ran."""
    import torch
    from architecture_models import MODELS as architectures
    from architecture_models import REFERENCES
    from speed.device_time import mark, milliseconds

    import wholebatch as wb

    torch.set_float32_matmul_precision("high")
    on_cuda = torch.cuda.is_available()
    device = "cuda" if on_cuda else "cpu"
    found = next(model for model in (*architectures, *REFERENCES) if model.name == name)
    case = found.sized(tiny=tiny, micro=micro)
    model = case.build(case.size).to(device)
    batch = {key: value.to(device) for key, value in case.batch(case.size, case.window).items()}
    train = wb.WholeBatch(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_cuda),
        loss=case.loss,
        micro_batch=micro,
        precision="bf16",
        execute="graph" if on_cuda else "compile",
        audit=False,
    )
    began = time.perf_counter()
    for _ in range(4):
        train.step(batch)
    if on_cuda:
        torch.cuda.synchronize()
    ready = time.perf_counter() - began
    print("READY", flush=True)
    sys.stdin.readline()
    train.step(batch)
    marks = [mark()]
    began = time.perf_counter()
    while len(marks) < 8 or (time.perf_counter() - began < 0.7 and len(marks) < 16):
        train.step(batch)
        marks.append(mark())
    times = milliseconds(marks)
    return {
        "ms": round(statistics.median(times), 2),
        "ready_s": round(ready, 1),
        "mode": train._runner.executor.mode,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown: times, and how much longer a window takes without the rewrite.

    A positive share is what the rewrite buys.
    """
    ms = {(row["model"], row["micro"], row["loop"]): row.get("ms") for row in rows}
    columns = sorted({key[:2] for key in ms}, key=lambda key: (-key[1], list(MODELS).index(key[0])))
    head = " | ".join(f"{model}, {micro}" for model, micro in columns)
    lines = [f"| | {head} |", f"|---|{'---:|' * len(columns)}"]
    for way in WAYS:
        cells = []
        for model, micro in columns:
            time_of, whole = ms.get((model, micro, way)), ms.get((model, micro, ALL))
            share = f" ({time_of / whole - 1:+.1%})" if time_of and whole and way != ALL else ""
            cells.append(f"{time_of:.1f}{share}" if time_of else "")
        if any(cells):
            lines.append(f"| {way} | {' | '.join(cells)} |")
    problems = [
        f"- {row['model']}, {row['micro']}, {row['loop']}: {row.get('error') or row['mode']}"
        for row in rows
        if row.get("error") or row["mode"] != "graph of compile"
    ]
    return "\n".join([*lines, "", *problems])


def page(rows: list[dict[str, Any]], where: str) -> str:
    """Return the page that explains the table."""
    return (
        "# What each rewrite buys\n\n"
        f"`python benchmarks/gpu_techniques.py --page`, {date.today().isoformat()}, {where}.\n"
        "Milliseconds of a window by model and micro-batch, with one rewrite switched off at a "
        "time,\nand how much longer the window takes.\n\n" + table(rows).strip() + "\n"
    )


def _spec_of(row: str) -> Spec:
    model, way, micro = row.split("/")
    return model, way, int(micro)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", help="model/way/micro-batch each; all if none")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the program out")
    parser.add_argument("--budget", type=float, default=470.0, help="seconds in all")
    parser.add_argument("--together", type=int, default=10, help="processes side by side")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(_spec_of(options.child), tiny=options.tiny)
    began = time.monotonic()
    paths = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    )
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    run_rows(
        list(map(_spec_of, options.rows)) if options.rows else SPECS,
        lambda spec, gib: Child(
            Path(__file__).resolve(), spec, ["--tiny"] if options.tiny else [], paths, gib
        ),
        expected,
        until=began + options.budget,
        report=report,
        together=options.together,
    )
    import torch

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    text = page(rows, f"{where}, torch {torch.__version__}")
    print(text, f"\n{time.monotonic() - began:.0f} s", sep="")
    if options.page:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
