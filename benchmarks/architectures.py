"""How the micro-steps of real architectures run: recorded, compiled, traced or eager, and why.

    python benchmarks/architectures.py                  # all of them, as far as this device goes
    python benchmarks/architectures.py --trace-only     # without Inductor: seconds for each
    python benchmarks/architectures.py --only t5 opt --verbose

Each model is a tiny random one (`tiny_models.py`). Two windows without padding make the graph; the
third window has other samples, with padding, and is the one that is compared: a graph that is only
right for the samples it was traced with shows here. The distance is the relative L2 error of the
window's gradient to that of the undivided batch in float64, beside that of eager micro-batches.
Writes docs/benchmarks/architectures.md and .json, unless `--only` is given.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Nothing is downloaded.

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tiny_models import MODELS, Batch, Tiny

import wholebatch as wb
from wholebatch.compile.execute_mode import Notes
from wholebatch.losses.loss import as_loss

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "architectures"
SAMPLES, MICRO = 8, 4
OUTCOMES = {
    "graph of compile": "recorded",
    "graph of operations": "recorded as traced",
    "compile": "compiled",
    "operations": "traced",
    "compiled forward": "compiled forward",
    "eager": "eager",
}
HARD = (
    "t5",
    "t5, dropout",
    "opt",
    "bart",
    "nn.LSTM",
    "nn.LSTM, dropout",
    "llama, LoRA (PEFT)",
    "llama, enable_input_require_grads",
    "llama, checkpointed",
    "llama, checkpointed, attention dropout",
    "mixtral",
    "qwen3_moe",
    "whisper",
    "deberta-v2",
    "mamba",
    "llava",
    "qwen2_vl",
    "switch_transformers",
)
"""The models that CUDA, or the trace, is most likely to refuse."""


@dataclass(frozen=True)
class Row:
    """One architecture: how it ran, and how far its gradient is from float64."""

    name: str
    group: str
    outcome: str
    reason: str
    eager: float | None
    graph: float | None
    seconds: float
    details: str = ""
    """Tracebacks of what stood in the way."""


def main() -> int:
    options = _options()
    _quieten()
    device = torch.device(options.device)
    known = {model.name: model for model in MODELS}
    chosen = [known[name] for name in options.only or known if name in known]
    unknown = set(options.only) - known.keys()
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        return 2
    began, rows = time.perf_counter(), []
    for place, model in enumerate(chosen, 1):
        if time.perf_counter() - began > options.budget:
            rows.append(Row(model.name, model.group, "not run", "no time left", None, None, 0.0))
            continue
        rows.append(row_of(model, device, options))
        print(f"{place}/{len(chosen)} {_line(rows[-1])}", flush=True)
        if options.verbose and rows[-1].details:
            print(rows[-1].details, flush=True)
    print(_counted(rows))
    if not options.only:
        _write(rows, device, options)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--hard", action="store_true", help="only those most likely to fail")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--trace-only", action="store_true", help="do not run Inductor")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--precision", default="full", choices=("full", "bf16", "fp16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    if options.hard:
        options.only = [*options.only, *HARD]
    return options


def _quieten() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)


# --------------------------------------------------------------------- one row


def row_of(tiny: Tiny, device: torch.device, options: argparse.Namespace) -> Row:
    """Run one model; a failure of any kind is its row."""
    began = time.perf_counter()
    try:
        outcome, reason, distances, details = _run(tiny, device, options)
    except ModuleNotFoundError as problem:
        outcome, reason, distances, details = "not run", str(problem), (None, None), ""
    except Exception as problem:  # A model of somebody else's may raise anything.
        outcome, distances, details = "failed", (None, None), traceback.format_exc()
        reason = f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"
    finally:
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    seconds = time.perf_counter() - began
    return Row(tiny.name, tiny.group, outcome, reason, *distances, round(seconds, 1), details)


def _run(
    tiny: Tiny, device: torch.device, options: argparse.Namespace
) -> tuple[str, str, tuple[float | None, float | None], str]:
    dtype = getattr(torch, options.dtype)
    model = tiny.build().to(device, dtype)
    batches = [_as(tiny.batch(SAMPLES, seed), device, dtype) for seed in (0, 0, 1)]
    execute = "graph" if device.type == "cuda" else "compile"
    with _Fallbacks() as fallbacks:
        found, train = _gradient(tiny, copy.deepcopy(model), batches, execute, options)
    mode = train._runner.executor.mode
    distances: tuple[float | None, float | None] = (None, None)
    if not tiny.random:
        truth = _undivided(tiny, copy.deepcopy(model).double(), batches[-1])
        eager, _ = _gradient(tiny, copy.deepcopy(model), batches, "eager", options)
        distances = _distance(eager, truth), _distance(found, truth)
    return OUTCOMES[mode], "; ".join(fallbacks.reasons), distances, "\n".join(fallbacks.tracebacks)


class _Fallbacks:
    """Keeps the reason of each fallback within this context, and its traceback."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.tracebacks: list[str] = []

    def __enter__(self) -> _Fallbacks:
        self._tell = tell = Notes.fell_back

        def fell_back(notes: Notes, from_: str, to: str, reason: str) -> None:
            if reason not in self.reasons:
                self.reasons.append(reason)
                self.tracebacks.append(traceback.format_exc())
            tell(notes, from_, to, reason)

        setattr(Notes, "fell_back", fell_back)  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        setattr(Notes, "fell_back", self._tell)  # noqa: B010


def _gradient(
    tiny: Tiny, model: nn.Module, batches: list[Batch], execute: Any, options: argparse.Namespace
) -> tuple[list[Tensor], wb.WholeBatch]:
    """Return the gradient of the last batch, after windows of all of them."""
    train = wb.WholeBatch(
        model,
        None,
        loss=tiny.loss,
        micro_batch=MICRO,
        execute=execute,
        precision=options.precision,
        **tiny.options,
    )
    if options.trace_only:
        train._runner.executor._plan.compiles = False
    for batch in batches:
        model.zero_grad(set_to_none=True)
        train.gradient(batch)
    return _gradients(model), train


def _gradients(model: nn.Module) -> list[Tensor]:
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for p in model.parameters()
        if p.requires_grad
    ]


def _undivided(tiny: Tiny, model: Any, batch: Batch) -> list[Tensor]:
    """Return the gradient of the whole batch in float64."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch has no grouped product in float64.
    if tiny.options.get("batchnorm") == "freeze":
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    batch = _as(batch, next(model.parameters()).device, torch.float64)
    loss = as_loss(tiny.loss(model, batch))
    (loss.total / loss.units).backward()  # type: ignore[union-attr]
    return _gradients(model)


def _as(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        for name, value in batch.items()
    }


def _distance(found: Iterable[Tensor], truth: list[Tensor]) -> float:
    above = torch.cat([(a.double() - b).flatten() for a, b in zip(found, truth, strict=True)])
    return float(above.norm() / torch.cat([b.flatten() for b in truth]).norm())


# --------------------------------------------------------------------- the page


def _line(row: Row) -> str:
    return (
        f"{row.name}: {row.outcome} in {row.seconds} s, eager {_number(row.eager)}, "
        f"graph {_number(row.graph)}{f' ({row.reason})' if row.reason else ''}"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _counted(rows: list[Row]) -> str:
    outcomes = [row.outcome for row in rows]
    return ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))


def _write(rows: list[Row], device: torch.device, options: argparse.Namespace) -> None:
    import transformers

    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    facts = {
        "date": date.today().isoformat(),
        "device": machine,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": options.dtype,
        "precision": options.precision,
        "trace_only": options.trace_only,
    }
    kept = [{k: v for k, v in asdict(row).items() if k != "details"} for row in rows]
    PAGE.with_suffix(".json").write_text(json.dumps({**facts, "rows": kept}, indent=1) + "\n")
    how = "traced, without Inductor" if options.trace_only else "compiled by Inductor"
    lines = [
        "# Architectures",
        "",
        f"`benchmarks/architectures.py`, {facts['date']}, {machine}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}, {options.dtype}, {how}: {_counted(rows)}.",
        "",
        *_EXPLAINED,
        "",
    ]
    for group in dict.fromkeys(row.group for row in rows):
        lines += [f"## {group[0].upper()}{group[1:]}", "", "| | runs | eager | graph | reason |"]
        lines += ["|---|---|---|---|---|"]
        lines += [
            f"| {row.name} | {row.outcome} | {_number(row.eager)} | {_number(row.graph)} | "
            f"{row.reason.replace('|', chr(92) + '|')} |"
            for row in rows
            if row.group == group
        ]
        lines.append("")
    PAGE.with_suffix(".md").write_text("\n".join(lines))
    print(f"wrote {PAGE.with_suffix('.md')}")


_EXPLAINED = (
    "Tiny random models of `transformers`. Two windows of texts without padding make the graph;",
    "the third has other texts, with padding, and is the one that is compared. *eager* and *graph*",
    "are the relative L2 distances of that window's gradient to the undivided batch's in float64:",
    "of eager micro-batches, and of the way it runs. (Many models compute norms and rotary tables",
    "in float32 whatever their dtype, so that float64 is not exact to its last digits.) Models",
    "that draw random numbers have no distance.",
)


if __name__ == "__main__":
    sys.exit(main())
