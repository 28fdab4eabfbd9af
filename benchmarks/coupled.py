"""Error and memory of a contrastive loss in two passes, against plain accumulation.

    python benchmarks/coupled.py [--plot-only]

Runs the model of `examples/clip_contrastive.py` on this machine in float64, split ever finer, and
writes docs/benchmarks/coupled.json and the plot of docs/contrastive.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.memory import MemoryMeter

ROOT = Path(__file__).resolve().parents[1]
JSON = ROOT / "docs/benchmarks/coupled.json"
COLOURS = {"plain": "#c0392b", "exact": "#1f77b4", "less": "#2e8b57", "whole": "#777777"}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradient(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def error(made: list[Tensor], right: list[Tensor]) -> float:
    above = sum(float((a - b).square().sum()) for a, b in zip(made, right, strict=True))
    return float((above / sum(float(b.square().sum()) for b in right)) ** 0.5)


def measured(make: Callable[[], nn.Module], run: Callable[[nn.Module], None]) -> tuple[Any, float]:
    """The gradient that `run` leaves in a fresh model, and its peak in MiB."""
    model = make()
    with MemoryMeter(model=model) as meter:
        run(model)
    return gradient(model), meter.peak / 2**20


def contrastive() -> list[dict[str, float]]:
    """CLIP on 128 pairs: in micro-batches of 128 to 4."""
    of = example("clip_contrastive")
    batch = of.pairs(128, 0)

    def make() -> nn.Module:
        return cast("nn.Module", of.Clip().double())

    def whole(model: nn.Module) -> None:
        (of.loss_of(model)(of.encode(model, batch)).total / 128).backward()

    right, peak = measured(make, whole)
    rows = []
    for micro in (128, 64, 32, 16, 8, 4):
        parts = wb.split(batch, micro)

        def plain(model: nn.Module, parts: list[Any] = parts) -> None:
            for part in parts:
                (of.loss_of(model)(of.encode(model, part)).total / 128).backward()

        row = {"micro_batches": float(len(parts)), "whole MiB": peak}
        made, used = measured(make, plain)
        row["plain error"], row["plain MiB"] = error(made, right), used
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        seen: list[Tensor] = []
        optimizer.register_step_pre_hook(
            lambda *_, seen=seen, model=model: seen.extend(g.clone() for g in gradient(model))
        )
        loss = wb.Coupled(of.encode, of.loss_of(model))
        train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro, audit=False)
        with MemoryMeter(model=model) as meter:
            train.step(batch)
        row["coupled error"], row["coupled MiB"] = error(seen, right), meter.peak / 2**20
        rows.append(row)
        print(row, flush=True)
    return rows


def plot(rows: list[dict[str, float]], lines: list[tuple[str, str, str]], path: Path) -> None:
    """Error on the left, memory on the right, over the number of micro-batches."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.hashsalt": "wholebatch", "font.size": 10, "svg.fonttype": "none"})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    counts = [row["micro_batches"] for row in rows]
    for name, label, colour in lines:
        errors = [max(row[f"{name} error"], 1e-16) for row in rows]
        left.plot(counts, errors, "o-", color=COLOURS[colour], label=label)
        right.plot(counts, [row[f"{name} MiB"] for row in rows], "o-", color=COLOURS[colour])
    left.set_yscale("log")
    left.set_ylim(1e-17, 10)
    left.axhline(1e-12, color=COLOURS["whole"], linestyle=":", linewidth=1)
    note = {"color": COLOURS["whole"], "fontsize": 9, "ha": "right", "va": "bottom"}
    left.text(counts[-1], 1.5e-12, "the promise: 1e-12", **note)
    left.set_title("error of the gradient", fontsize=11)
    right.axhline(rows[0]["whole MiB"], color=COLOURS["whole"], linestyle="--", linewidth=1)
    right.annotate(
        "undivided", (counts[-1], rows[0]["whole MiB"]), (0, 5), textcoords="offset points", **note
    )
    right.set_ylim(0, 1.25 * max(row[f"{name} MiB"] for row in rows for name, _, _ in lines))
    right.set_title("peak memory (MiB)", fontsize=11)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [f"{count:.0f}" for count in counts])
        axes.set_xlabel("micro-batches")
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(lines), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot-only", action="store_true", help="from the numbers that are there")
    parser.add_argument("--format", default="svg", choices=("svg", "png"))
    options = parser.parse_args()
    if options.plot_only:
        found = json.loads(JSON.read_text(encoding="utf-8"))
    else:
        found = {
            "torch": str(torch.__version__),
            "contrastive": contrastive(),
        }
        JSON.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    plot(
        found["contrastive"],
        [("plain", "plain accumulation", "plain"), ("coupled", "wb.Coupled", "exact")],
        ROOT / f"docs/images/contrastive.{options.format}",
    )


if __name__ == "__main__":
    main()
