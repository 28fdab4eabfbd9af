"""Speed, memory and exactness of real architectures, beside eager code and torch.compile.

    python benchmarks/architectures.py --slice 1/2 --out rows.jsonl --budget 520    # on CUDA
    python benchmarks/architectures.py --slice 2/2 --out rows.jsonl --budget 520
    python benchmarks/architectures.py --page rows.jsonl    # docs/benchmarks/architectures.md
    python benchmarks/architectures.py --models mixtral,phi3 --out rows.jsonl
    python benchmarks/architectures.py --references --out rows.jsonl --budget 360
    python benchmarks/architectures.py --models llama:1,llama:4,llama:16 \
        --ways wholebatch,torch.compile,reduce-overhead --out sizes.jsonl --budget 140
    python benchmarks/architectures.py --sizes sizes.jsonl  # a table of docs/speed.md
    python benchmarks/architectures.py --models llama,vit --tiny --out /tmp/rows.jsonl   # on a CPU

`llama:4` is that model in micro-batches of 4. Every model runs in a process of its own, several of
them side by side, since most of the time goes to compilers. A lock file lets one process at a time
do what is measured. A row is one JSON line. It is appended to `--out` as soon as its model is done;
a model that is there already is not run again.

The times are medians of whole windows with the optimizer's step. The distances are relative L2
errors of a window's gradient to that of the undivided batch in float64: of the undivided batch
under autocast, and of the window of WholeBatch.

`torch.compile` compiles the model and its loss as one function; `reduce-overhead` records that
function's kernels as CUDA graphs, too. The share of the peak is the operations of an eager forward
and backward pass (torch's own counter), by the time of the window.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import gc
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from speed.together import signal_group, stopped

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Nothing is downloaded.

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "architectures.md"
SIZES_PAGE = ROOT / "docs" / "speed.md"
SIZES_PLOT = ROOT / "docs" / "images" / "speed-over-tokens.svg"
WAYS = ("wholebatch", "loop", "torch.compile", "reduce-overhead", "undivided")
GIB = 2**30
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""bf16 operations per second without sparsity, from NVIDIA's data sheets."""


# ----------------------------------------------------------- one model, in its own process


def run_model(options: argparse.Namespace) -> None:
    """Measure one model in every way that was asked for; a failure is part of its row."""
    import torch
    from architecture_models import MODELS, REFERENCES

    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    name, _, micro = options.child.partition(":")
    found = next(one for one in (*MODELS, *REFERENCES) if one.name == name)
    bench = Bench(found.sized(tiny=options.tiny, micro=int(micro or 0)), options)
    row: dict[str, Any] = {
        "name": options.child,
        "group": found.group,
        "window": bench.case.window,
        "micro": bench.case.micro,
        "tokens": bench.case.tokens,
        **environment(),
    }
    if micro:
        row["operations"] = bench.operations()
    began = time.perf_counter()
    for way in options.ways.split(",") if options.ways else bench.case.ways:
        try:
            row[way] = bench.measured(way)
        except Exception as problem:  # Somebody else's model may raise anything.
            message = " ".join(str(problem).split()) or "no message"
            row[way] = {"error": f"{type(problem).__name__}: {message[:240]}"}
        finally:
            gc.collect()
            torch.compiler.reset()
            if bench.on_cuda:
                torch.cuda.empty_cache()
        row["seconds"] = round(time.perf_counter() - began, 1)
        options.out.write_text(json.dumps(row))  # What there is counts if the process is stopped.


def environment() -> dict[str, Any]:
    import torch
    import transformers

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": date.today().isoformat(),
    }


class Bench:
    """One architecture and the ways to train it."""

    def __init__(self, case: Any, options: argparse.Namespace) -> None:
        import torch

        self.case = case
        self.on_cuda = torch.cuda.is_available()
        self.device = "cuda" if self.on_cuda else "cpu"
        self._options = options
        batch = case.batch(case.size, case.window)
        self.batch = {name: value.to(self.device) for name, value in batch.items()}
        self.parts = [
            {name: value[start : start + case.micro] for name, value in self.batch.items()}
            for start in range(0, case.window, case.micro)
        ]

    def measured(self, way: str) -> dict[str, Any]:
        """Return milliseconds per window and GiB; for WholeBatch also how it ran and distances."""
        if way == "wholebatch":
            return self._whole_batch()
        parts = [self.batch] if way == "undivided" else self.parts
        return self._times(self._loop(parts, way), warm=3)

    def operations(self) -> int:
        """Return the floating-point operations of a window, counted in eager code."""
        from wholebatch.memory.operations import operation_counter

        model, _ = self._model()
        with operation_counter() as counter, self._autocast():
            self.case.loss(model, self.parts[0]).total.backward()
        return int(counter.get_total_flops()) * len(self.parts)

    def _model(self) -> tuple[Any, Any]:
        import torch

        model = self.case.build(self.case.size).to(self.device)
        if self._options.channels_last:
            model.to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=self.on_cuda)

    def _autocast(self) -> Any:
        import torch

        return torch.autocast(self.device, torch.bfloat16)

    def _loop(self, parts: Sequence[Any], way: str) -> Callable[[], None]:
        """Return a function that makes one update by a loop over these micro-batches."""
        import torch

        model, optimizer = self._model()
        recorded = way == "reduce-overhead"

        def mean(part: Any) -> Any:
            loss = self.case.loss(model, part)
            return loss.total / (len(parts) * loss.units)

        forward = mean
        if way != "loop":  # The model and its loss together.
            forward = torch.compile(mean, mode="reduce-overhead" if recorded else None)
        if recorded:  # A replay writes over its gradients, so they are added into tensors of ours.
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)

        def window() -> None:
            for part in parts:
                if recorded:
                    torch.compiler.cudagraph_mark_step_begin()
                with self._autocast():
                    loss = forward(part)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not recorded)

        return window

    def _whole_batch(self) -> dict[str, Any]:
        import wholebatch as wb

        model, optimizer = self._model()
        execute: Any = self._options.execute or ("graph" if self.on_cuda else "compile")
        train = wb.WholeBatch(
            model,
            optimizer,
            loss=self.case.loss,
            micro_batch=self.case.micro,
            precision="bf16",
            execute=execute,
            **self.case.options,
        )
        began = time.perf_counter()
        train.step(self.batch)
        first = time.perf_counter() - began
        found = self._times(lambda: train.step(self.batch), warm=4)
        executor = train._runner.executor
        undivided = train._runner.is_undivided()
        reasons = list(dict.fromkeys(executor.notes.reasons))
        if undivided:
            reasons.insert(0, "BatchNorm: the batch runs undivided, so that it is exact")
        found |= {
            "mode": executor.mode,
            "undivided": undivided,
            "reasons": reasons,
            "first_window_s": round(first, 1),
            "notes": executor.notes.history[-3:],
        }
        if self._options.distances and not self.case.random and self.case.group != "reference":
            with self._alone(stops=False):  # In float64 it takes long, and much memory.
                found |= self._distances(train, model)
        return found

    # ----------------------------------------------------------------- times

    def _times(self, window: Callable[[], Any], *, warm: int) -> dict[str, Any]:
        """Return the median milliseconds of a window after `warm` of them, and the memory."""
        import torch
        from speed.device_time import mark, milliseconds

        for _ in range(warm):
            window()
        with self._alone():
            if self.on_cuda:
                torch.cuda.synchronize()
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            marks = [mark()]  # By the device's clock: nothing waits between windows.
            began = time.perf_counter()
            while len(marks) < 6 or (time.perf_counter() - began < 1.2 and len(marks) < 16):
                window()
                marks.append(mark())
            times = milliseconds(marks)
        found: dict[str, Any] = {"ms": round(statistics.median(times), 2)}
        if self.on_cuda:
            found["gib"] = round(torch.cuda.memory_reserved() / GIB, 2)
            found["peak_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
        return found

    @contextmanager
    def _alone(self, *, stops: bool = True) -> Iterator[None]:
        """Hold the lock that all processes share; with `stops`, stop the others meanwhile."""
        with open(self._options.lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with stopped(_siblings() if stops else []):
                time.sleep(0.2)  # Kernels that they have launched come to an end.
                yield

    # ------------------------------------------------------------- distances

    def _distances(self, train: Any, model: Any) -> dict[str, Any]:
        """Return the distances to float64 of the undivided batch and of the window."""
        import torch
        from torch import nn

        model.zero_grad(set_to_none=True)
        train.gradient(self.batch)
        ours = _gradients(model)
        model.zero_grad(set_to_none=True)
        try:
            with self._autocast():
                loss = self.case.loss(model, self.batch)
            (loss.total / loss.units).backward()
            undivided = _gradients(model)
            model.zero_grad(set_to_none=True)
            exact = copy.deepcopy(model).double()
            if hasattr(exact, "set_experts_implementation"):
                exact.set_experts_implementation("eager")  # Grouped products have no float64.
            coupled = any(
                isinstance(one, nn.modules.batchnorm._BatchNorm) for one in exact.modules()
            )
            units = 0.0
            for part in [self.batch] if coupled else self.parts:
                loss = self.case.loss(exact, _in_double(part))
                loss.total.backward()
                units += float(loss.units)
            truth = [gradient / units for gradient in _gradients(exact)]
        except torch.OutOfMemoryError:
            return {"distances": "out of memory"}
        return {
            "distance": _distance(ours, truth),
            "undivided_distance": _distance(undivided, truth),
        }


def _siblings() -> list[int]:
    """Return the other processes that measure models; none where the system does not list them."""
    parent = os.getppid()
    try:
        listed = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(one) for one in listed.split() if int(one) != os.getpid()]


def _gradients(model: Any) -> list[Any]:
    import torch

    return [
        torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for p in model.parameters()
        if p.requires_grad
    ]


def _in_double(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if value.is_floating_point() else value
        for name, value in batch.items()
    }


def _distance(found: Sequence[Any], truth: Sequence[Any]) -> float:
    above = sum(float((a.double() - b).square().sum()) for a, b in zip(found, truth, strict=True))
    return float((above / sum(float(b.square().sum()) for b in truth)) ** 0.5)


# ------------------------------------------------------------- many models, side by side


def run_all(options: argparse.Namespace) -> int:
    """Run the chosen models in processes, and append their rows to the file."""
    names = _chosen(options)
    done = {row["name"] for row in _rows(options.out)} if options.out.exists() else set[str]()
    todo = [name for name in names if name not in done]
    until = time.monotonic() + options.budget
    running: dict[str, tuple[subprocess.Popen[str], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while todo or running:
            while todo and len(running) < options.together and time.monotonic() < until - 60:
                name = todo.pop(0)
                running[name] = _start(name, options, Path(folder)), time.monotonic()
            for name, (process, began) in list(running.items()):
                seconds = time.monotonic() - began
                late = time.monotonic() > until or seconds > options.limit
                if process.poll() is None and not late:
                    continue
                del running[name]
                if process.poll() is None:
                    signal_group(process.pid, signal.SIGKILL)
                    process.wait()
                    for other, _ in running.values():  # It may have stopped them.
                        signal_group(other.pid, signal.SIGCONT)
                    written = (Path(folder) / f"{name}.json").exists()
                    if seconds <= options.limit and not written:
                        print(f"{name}: the budget is spent after {seconds:.0f} s", flush=True)
                        continue
                _report(name, Path(folder), options, seconds)
            if not running and todo:
                print(f"no time left for {','.join(todo)}", flush=True)
                break
            time.sleep(0.2)
    return 0


def _start(name: str, options: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", name]
    command += ["--ways", options.ways] if options.ways else []
    command += ["--lock", str(folder / "lock"), "--out", str(folder / f"{name}.json")]
    command += ["--tiny"] if options.tiny else []
    command += [] if options.distances else ["--no-distances"]
    command += ["--execute", options.execute] if options.execute else []
    command += ["--channels-last"] if options.channels_last else []
    paths = [ROOT / "src", ROOT / "benchmarks", os.environ.get("PYTHONPATH", "")]
    around = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, min(4, (os.cpu_count() or 1) // 4))),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen(
            command,
            env=around,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,  # A group of its own, to be stopped as one.
        )


def _report(name: str, folder: Path, options: argparse.Namespace, seconds: float) -> None:
    """Print and append the row of a process that has ended, or what it wrote last."""
    written = folder / f"{name}.json"
    if written.exists():
        row = json.loads(written.read_text())
    else:
        log = (folder / f"{name}.log").read_text().splitlines()
        print("\n".join(log[-12:]), flush=True)
        last = log[-1][-240:] if log else "no message"
        late = f"stopped at the limit of {options.limit:.0f} s for one model"
        ended = f"its process ended after {seconds:.0f} s: {last}"
        row = {"name": name, "error": late if seconds > options.limit else ended}
    with open(options.out, "a") as file:
        file.write(json.dumps(row) + "\n")
    print(_line(row), flush=True)


def _chosen(options: argparse.Namespace) -> list[str]:
    from architecture_models import MODELS, REFERENCES

    known = [model.name for model in (*MODELS, *REFERENCES)]
    if options.models:
        names: list[str] = options.models.split(",")
        if unknown := [name for name in names if name.partition(":")[0] not in known]:
            raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return names
    if options.references:
        return [model.name for model in REFERENCES]
    names = [model.name for model in MODELS]
    part, _, parts = options.slice.partition("/")
    return names[int(part) - 1 :: int(parts)]


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; a later row adds its ways to an earlier one."""
    found: dict[str, dict[str, Any]] = {}
    for row in (json.loads(line) for line in path.read_text().splitlines() if line.strip()):
        earlier = found.get(row["name"], {})
        if "error" not in row:
            earlier.pop("error", None)
        elif "wholebatch" in earlier:
            continue  # A process that was stopped takes nothing back.
        found[row["name"]] = {**earlier, **row}
    return list(found.values())


# --------------------------------------------------------------------------- the page


def _line(row: dict[str, Any]) -> str:
    """Return the row as a line to print, with the peaks of memory."""
    more = [f"{way} {row[way]}" for way in ("undivided",) if way in row]
    peak = row.get("wholebatch", {}).get("peak_gib")
    more += [] if peak is None else [f"peak {peak} GiB, {row['seconds']} s"]
    return " | ".join([*_cells(row), *more])


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["name"], "", "", "", "", "", "", row["error"]]
    ours, loop, compiled = (row.get(way, {}) for way in WAYS[:3])
    ratio = ""
    if ours.get("undivided_distance"):
        ratio = f"{ours['distance'] / ours['undivided_distance']:.2f}"
    return [
        row["name"],
        _number(loop.get("ms")),
        _number(compiled.get("ms")),
        _number(ours.get("ms")),
        "yes" if ours.get("mode") == "graph of compile" else ours.get("mode", ""),
        ratio,
        f"{_number(loop.get('gib'), 1)} / {_number(ours.get('gib'), 1)}",
        "; ".join([*ours.get("reasons", []), *_errors(row)]),
    ]


def _page_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of the page."""
    name, _, compiled, ours, _, ratio, _, _ = _cells(row)
    return [name, compiled, ours, ratio, _number(row.get("wholebatch", {}).get("gib"), 1)]


def _not_recorded(row: dict[str, Any]) -> str:
    """Say how a model runs, and why, where it is not one recorded CUDA graph; else nothing."""
    _, _, _, _, recorded, _, _, why = _cells(row)
    told = [recorded] if recorded and recorded != "yes" else []
    return "; ".join([*told, *([why] if why else [])])


def _errors(row: dict[str, Any]) -> list[str]:
    return [f"{way}: {row[way]['error']}" for way in WAYS if "error" in row.get(way, {})]


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def write_page(path: Path) -> int:
    """Write the tables of all rows, their counts, and the models that have no row."""
    from architecture_models import MODELS

    found = {row["name"]: row for row in _rows(path)}
    rows = [found[model.name] | {"group": model.group} for model in MODELS if model.name in found]
    whole = [row for row in rows if "ms" in row.get("wholebatch", {})]
    if not whole:
        print(f"{path} has no row with a time")
        return 1
    facts = whole[0]
    lines = [
        "# Architectures",
        "",
        f"Written by `python benchmarks/architectures.py --page` from rows of {facts['date']}: "
        f"{facts['device']}, torch {facts['torch']}, transformers {facts['transformers']}.",
        "",
        *_counts(rows, len(MODELS)),
        "",
        *_EXPLAINED,
        "",
    ]
    lines += ["| | torch.compile, ms | WholeBatch, ms | distance | GiB |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for group in dict.fromkeys(row["group"] for row in rows):
        lines.append(f"| **{group[0].upper()}{group[1:]}** |")
        lines += [
            f"| {' | '.join(_page_cells(row))} |"
            for row in rows
            if row["group"] == group and "error" not in row
        ]
    lines += ["", "## Stopped, eager or undivided", ""]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if reason := _not_recorded(row):
            reasons.setdefault(reason, []).append(row["name"])
    lines += [f"- {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    lines.append("")
    lines += _remarks(rows, [model.name for model in MODELS if model.name not in found])
    PAGE.write_text("\n".join(lines))
    print(f"wrote {PAGE}")
    return 0


def _counts(rows: Sequence[dict[str, Any]], models: int) -> list[str]:
    """Say how many models ran and were recorded, and how they compare with torch.compile."""
    recorded = [row for row in rows if row.get("wholebatch", {}).get("mode") == "graph of compile"]
    lines = [
        f"{len(rows)} of {models} models have a row; {len(recorded)} of them are recorded as one "
        "CUDA graph."
    ]
    split = [row for row in recorded if not row["wholebatch"]["undivided"]]
    ratios = [
        row["torch.compile"]["ms"] / row["wholebatch"]["ms"]
        for row in split
        if "ms" in row.get("torch.compile", {})
    ]
    if ratios:
        lines.append(
            f"On the {len(ratios)} recorded ones without BatchNorm, which train the same model in "
            f"all ways, WholeBatch is {min(ratios):.1f} to {max(ratios):.1f} times as fast as a "
            f"loop with `torch.compile` (median {statistics.median(ratios):.1f})."
        )
    return lines


def _remarks(rows: Sequence[dict[str, Any]], missing: Sequence[str]) -> list[str]:
    """Return the section on what the tables leave open."""
    remarks = []
    if missing:
        remarks.append(f"Not measured: {', '.join(missing)}.")
    rough = [
        row["name"] for row in rows if row.get("wholebatch", {}).get("undivided_distance", 0.0) > 1
    ]
    if rough:
        remarks.append(
            f"With these random weights bf16 itself is further than 1 from float64 in "
            f"{', '.join(rough)}: their distances say nothing about the split."
        )
    return ["## What is open", "", *(f"- {remark}" for remark in remarks), ""] if remarks else []


# ------------------------------------------------ beside torch.compile, over micro-batch sizes


def write_sizes(path: Path) -> int:
    """Write the table and the plot of models that were measured in several micro-batch sizes."""
    from pages import written

    rows = sorted(_rows(path), key=lambda row: (row["name"].partition(":")[0], row["micro"]))
    rows = [row for row in rows if "ms" in row.get("wholebatch", {})]
    if not rows:
        print(f"{path} has no row with a time")
        return 1
    facts = rows[0]
    lines = [
        f"Measured on {facts['date']}: {facts['device']}, torch {facts['torch']}, transformers "
        f"{facts['transformers']}.",
        "",
        "![How many times as fast as the better of both, over the tokens of a micro-batch]"
        "(images/speed-over-tokens.svg)",
        "",
        "| model | tokens in a micro-batch | torch.compile, ms | reduce-overhead, ms "
        "| WholeBatch, ms | times as fast as the better one | share of the peak |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(f"| {' | '.join(_size_cells(row))} |" for row in rows),
    ]
    page = written(SIZES_PAGE.read_text(encoding="utf-8"), "sizes", lines)
    SIZES_PAGE.write_text(page, encoding="utf-8")
    plot_sizes(rows)
    print(f"wrote {SIZES_PAGE} and {SIZES_PLOT}")
    return 0


def _size_cells(row: dict[str, Any]) -> list[str]:
    compiled = [row.get(way, {}).get("ms") for way in ("torch.compile", "reduce-overhead")]
    times = _times_as_fast(row)
    peak = next((peak for card, peak in PEAK.items() if card in row["device"]), None)
    share = row["operations"] / row["wholebatch"]["ms"] * 1000 / peak if peak else None
    return [
        row["name"].partition(":")[0],
        str(row["micro"] * row["tokens"]),
        *(_number(ms) or "–" for ms in compiled),
        _number(row["wholebatch"]["ms"]),
        "–" if times is None else f"{times:.2f}",
        "–" if share is None else f"{share:.0%}",
    ]


def _times_as_fast(row: dict[str, Any]) -> float | None:
    """Return how many times as fast WholeBatch is as the better of the two compiled loops."""
    ways = [row.get(way, {}).get("ms") for way in ("torch.compile", "reduce-overhead")]
    known = [float(ms) for ms in ways if ms is not None]
    return min(known) / float(row["wholebatch"]["ms"]) if known else None


def plot_sizes(rows: Sequence[dict[str, Any]]) -> None:
    """Draw a line for each model, and one where both are equally fast."""
    import matplotlib as mpl
    from matter.charts import STYLE, save

    mpl.use("svg")
    from matplotlib import pyplot

    colours = ("#1a8f74", "#d1495b", "#b07d00", "#59636e")
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
        axes.axhline(1.0, color="#d0d7de")
        names = dict.fromkeys(row["name"].partition(":")[0] for row in rows)
        for name, colour in zip(names, colours, strict=False):
            mine = [row for row in rows if row["name"].partition(":")[0] == name]
            points = [(row["micro"] * row["tokens"], _times_as_fast(row)) for row in mine]
            known = [(tokens, times) for tokens, times in points if times is not None]
            axes.plot(*zip(*known, strict=True), "o-", color=colour, label=name, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens in a micro-batch")
        axes.set_ylabel("times as fast as torch.compile")
        axes.legend(fontsize=8)
        save(figure, SIZES_PLOT)
        pyplot.close(figure)


_EXPLAINED = (
    "Random weights, bf16 autocast, fused AdamW. Texts: 8 layers of 768, sequences of 512 tokens,",
    "windows of 32 in micro-batches of 4. Images: 224 pixels, windows of 128 in micro-batches of",
    '16. WholeBatch runs with `execute="graph"`. Milliseconds are medians of whole windows, the',
    "optimizer's step included. *distance*: the gradient's relative L2 distance to float64, as a",
    "multiple of that of the undivided batch under autocast. *GiB*: reserved between windows. The",
    "loops with BatchNorm normalise each micro-batch by itself: they train another model.",
)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", help="names, separated by commas; NAME:SIZE for a micro-batch")
    parser.add_argument("--slice", default="1/1", help="part i of n, as i/n")
    parser.add_argument("--references", action="store_true", help="the models of known times")
    parser.add_argument("--ways", help=f"of {', '.join(WAYS)}; each model has its own")
    parser.add_argument("--out", type=Path, help="a file for JSON lines")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds in all")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one model")
    parser.add_argument("--together", type=int, default=5, help="processes side by side")
    parser.add_argument("--execute", help="of WholeBatch; by default the fastest for the device")
    parser.add_argument("--channels-last", action="store_true", help="memory format of weights")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    parser.add_argument("--no-distances", dest="distances", action="store_false")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of these rows")
    parser.add_argument("--sizes", type=Path, metavar="FILE", help="write the table of NAME:SIZE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--lock", default=os.devnull, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.page is None and options.sizes is None and options.out is None:
        parser.error("--out FILE is missing: the rows are appended to it")
    return options


def main() -> int:
    options = read_options()
    if options.page is not None:
        return write_page(options.page)
    if options.sizes is not None:
        return write_sizes(options.sizes)
    if options.child:
        run_model(options)
        return 0
    return run_all(options)


if __name__ == "__main__":
    sys.exit(main())
