"""Which part of memory each technique removes: one model, one batch, by what the bytes are for.

    python benchmarks/gradient_memory.py                   # measures, on this device
    python benchmarks/gradient_memory.py --model gpt-124m  # a larger model, for a GPU
    python benchmarks/gradient_memory.py --plot            # table and plot from the numbers again

Every row trains two windows of the same batch and counts, in the second, the bytes of every tensor
on the device that is alive at the peak. On a CPU, state "on the host" does not count, and neither
does the memory inside kernels. Writes docs/benchmarks/gradient_memory.json, the table of
docs/memory.md, and docs/images/gradient-memory.svg.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from speed.models import CASES, Case, gpt_of, summed  # noqa: E402
from which_mean import written  # noqa: E402

import wholebatch as wb  # noqa: E402
from wholebatch.memory.activation_checkpointing import with_checkpoints  # noqa: E402
from wholebatch.memory.meter import MemoryMeter  # noqa: E402

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
SAMPLES = 8
PARTS = ("parameters", "gradients", "optimizer state", "activations", "temporaries")
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"precision": "bf16"},
    "checkpointing": {"checkpoints": True},
    "accumulation": {"micro_batch": 1},
    "accumulation, optimizer state on the host": {
        "micro_batch": 1,
        "memory": wb.Memory(optimizer_state="host"),
    },
    "one sample, plain": {"samples": 1},
}
SMALL = gpt_of(4, 128, 4, 512, 64, window=8)
"""A size that a CPU can train."""


def case_of(name: str) -> Case:
    return SMALL if name == "gpt-small" else CASES[name]


def free() -> None:
    gc.collect()
    if HAS_CUDA:
        torch.cuda.empty_cache()


def built(name: str, *, checkpoints: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = case_of(name).build()
    if checkpoints:
        with_checkpoints(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def batch_of(name: str, samples: int) -> Any:
    case = case_of(name)
    return default_collate([case.sample(index) for index in range(samples)])


def parts_of(meter: MemoryMeter) -> dict[str, int]:
    """What is alive at the peak; the batch itself is left out."""
    peak = meter.peak_by_category
    return {name: int(peak.get(name, 0)) for name in PARTS}


def measured(
    name: str, *, checkpoints: bool = False, samples: int = SAMPLES, **options: Any
) -> dict[str, int]:
    model, optimizer = built(name, checkpoints=checkpoints)
    options = {"micro_batch": samples, **options}
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=summed,
        units=lambda micro: micro["y"].numel(),
        execute="eager",
        audit=False,
        **options,
    )
    batch = batch_of(name, samples)
    train.step(batch)
    with MemoryMeter(model=model, optimizer=optimizer) as meter:
        train.step(batch)
    found = parts_of(meter)
    if "memory" in options and not HAS_CUDA:
        # On a CPU the meter counts the state that waits on the host.
        waiting = sum(one.nbytes for state in optimizer.state.values() for one in state.values())
        found["optimizer state"] = max(0, found["optimizer state"] - waiting)
    return found


def page(found: dict[str, Any]) -> str:
    """The table, in Markdown, in MiB."""
    head = "| | " + " | ".join(PARTS) + " | together |"
    lines = [head, "|---" * (len(PARTS) + 2) + "|"]
    for name, row in found["rows"].items():
        cells = [f"{row[part] / 2**20:,.1f}" for part in PARTS]
        lines.append(f"| {name} | {' | '.join(cells)} | {sum(row.values()) / 2**20:,.1f} |")
    return "\n".join(lines) + "\n"


def plot(found: dict[str, Any], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "wholebatch"
    from matplotlib import pyplot

    colours = ("#1b6ca8", "#d1495b", "#edae49", "#66a182", "#bbbbbb")
    names = list(found["rows"])
    figure, axes = pyplot.subplots(figsize=(8, 0.42 * len(names) + 1.2))
    left = [0.0] * len(names)
    for part, colour in zip(PARTS, colours, strict=True):
        sizes = [found["rows"][name][part] / 2**20 for name in names]
        axes.barh(names, sizes, left=left, color=colour, label=part, height=0.7)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("MiB on the device at the peak")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="gpt-small", choices=["gpt-small", *sorted(CASES)])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--plot", action="store_true", help="only table and plot again")
    options = parser.parse_args()
    file = options.out / "benchmarks" / "gradient_memory.json"
    if not options.plot:
        file.parent.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {
            "model": options.model,
            "samples": SAMPLES,
            "device": torch.cuda.get_device_name() if HAS_CUDA else "CPU",
            "torch": torch.__version__,
            "rows": {},
        }
        runs: dict[str, Callable[[], dict[str, int]]] = {
            name: partial(measured, options.model, **row) for name, row in ROWS.items()
        }
        for name, run in runs.items():
            try:
                found["rows"][name] = run()
                print(f"{name}: {found['rows'][name]}", flush=True)
            except Exception as problem:
                print(f"{name}: {type(problem).__name__}: {str(problem)[:400]}", flush=True)
            free()
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    data = json.loads(file.read_text(encoding="utf-8"))
    table = page(data)
    shown = options.out / "memory.md"
    if shown.exists():
        text = written(
            shown.read_text(encoding="utf-8"), "gradient_memory", ["", table.strip(), ""]
        )
        shown.write_text(text, encoding="utf-8")
    print(table)
    if importlib.util.find_spec("matplotlib"):
        plot(data, options.out / "images" / "gradient-memory.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
