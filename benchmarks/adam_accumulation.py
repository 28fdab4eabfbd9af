"""The loss of bytes-gpt with the exact update and with Adam accumulation, update by update.

    python benchmarks/adam_accumulation.py                      # the recipe's batches, one seed
    python benchmarks/adam_accumulation.py --samples 16 --micro 8 4 2 1 --seed 0 1 2
    python benchmarks/adam_accumulation.py --show               # table and plot, from the numbers

Same weights, same batches, no clipping. Three ways to make the update: exact, by
`gradients="moments"`, and by Adam accumulation as it was proposed (arXiv 2305.19982), by hand; a
fourth, `--way again`, is the exact update in micro-batches: what other roundings alone come to. The
loss of the last 20 of 200 updates is compared. A training run that the file has already is not made
again, so that a command can be stopped and repeated. Writes docs/benchmarks/adam_accumulation.json
and .md, and the plot docs/images/adam-accumulation.svg (where matplotlib is installed).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import wholebatch as wb  # noqa: E402
from wholebatch.cli.recipes import bytes_gpt  # noqa: E402

LAST = 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = {
    "exact": "exact update",
    "again": "exact update, other micro-batches",
    "moments": 'gradients="moments"',
    "proposed": "Adam accumulation as proposed",
}
COLOURS = {"exact": "#1b6ca8", "moments": "#2a9d4b", "proposed": "#d1495b"}


def batches(*, updates: int, samples: int, seed: int) -> Iterator[dict[str, Tensor]]:
    data = bytes_gpt.data()
    order = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        places = torch.randint(0, len(data), (samples,), generator=order).tolist()
        batch = default_collate([data[place] for place in places])
        yield {name: leaf.to(DEVICE) for name, leaf in batch.items()}


def losses(way: str, *, updates: int, samples: int, micro: int, seed: int) -> list[float]:
    """The loss of every update, by the library."""
    torch.manual_seed(seed)
    model = bytes_gpt.model().to(DEVICE)
    optimizer = bytes_gpt.optimizer(model)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=bytes_gpt.loss,
        units=bytes_gpt.units,
        micro_batch=micro,
        scheduler=bytes_gpt.scheduler(optimizer, updates),
        execute="eager",
        audit=False,
        memory=wb.Memory(gradients="moments" if way == "moments" else "device"),
    )
    every = batches(updates=updates, samples=samples, seed=seed)
    return [train.step(batch).loss for batch in every]


def as_proposed(*, updates: int, samples: int, micro: int, seed: int) -> list[float]:
    """The loss of every update where v gets the sum of the micro-batches' squared gradients."""
    torch.manual_seed(seed)
    model = bytes_gpt.model().to(DEVICE)
    optimizer = bytes_gpt.optimizer(model)
    scheduler = bytes_gpt.scheduler(optimizer, updates)
    parameters = list(model.parameters())
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in parameters}
    found = []
    every = batches(updates=updates, samples=samples, seed=seed)
    for update, batch in enumerate(every, start=1):
        units, total = bytes_gpt.units(batch), 0.0
        parts: list[tuple[Tensor, ...]] = []
        for start in range(0, samples, micro):
            piece = {name: leaf[start : start + micro] for name, leaf in batch.items()}
            loss = bytes_gpt.loss(model, piece).total
            parts.append(torch.autograd.grad(loss / units, parameters))
            total += loss.item()
        found.append(total / units)
        gradients = dict(zip(parameters, zip(*parts, strict=True), strict=True))
        with torch.no_grad():
            for group in optimizer.param_groups:
                (beta1, beta2), lr = group["betas"], group["lr"]
                for p in group["params"]:
                    m, v = moments[p]
                    m.mul_(beta1).add_(torch.stack(gradients[p]).sum(0), alpha=1 - beta1)
                    v.mul_(beta2).add_(torch.stack(gradients[p]).square().sum(0), alpha=1 - beta2)
                    p.mul_(1 - lr * group["weight_decay"])
                    below = (v / (1 - beta2**update)).sqrt_().add_(group["eps"])
                    p.sub_(m / (1 - beta1**update) / below * lr)
        optimizer.step()  # without gradients: for the scheduler
        scheduler.step()
    return found


def row(way: str, options: argparse.Namespace, micro: int, seed: int) -> dict[str, Any]:
    """What identifies a training run; the exact update does not depend on the micro-batch."""
    setting = {"updates": options.updates, "samples": options.samples, "seed": seed}
    return {"way": way, **setting, "micro": options.samples if way == "exact" else micro}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("way", "updates", "samples", "seed", "micro"))


def end(run: dict[str, Any]) -> float:
    return statistics.fmean(run["losses"][-LAST:])


def pairs(runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every run with the exact one of the same batches."""
    for run in runs:
        for exact in runs:
            if same({**run, "way": "exact", "micro": run["samples"]}, exact) and run is not exact:
                yield run, exact


def page(runs: list[dict[str, Any]]) -> str:
    """One line for every number of micro-batches, with the seeds side by side."""
    kinds = {(r["samples"], r["samples"] // r["micro"], r["way"]) for r, _ in pairs(runs)}
    lines = ["| batch | K | update | by seed | mean |", "|---|---|---|---|---|"]
    for samples, number, way in sorted(kinds, key=lambda k: (-k[0], k[1], list(WAYS).index(k[2]))):
        off = [
            end(r) / end(exact) - 1.0
            for r, exact in sorted(pairs(runs), key=lambda pair: pair[0]["seed"])
            if (r["samples"], r["samples"] // r["micro"], r["way"]) == (samples, number, way)
        ]
        each = ", ".join(f"{one:+.2%}" for one in off)
        mean = statistics.fmean(off)
        lines.append(f"| {samples} | {number} | {WAYS[way]} | {each} | {mean:+.2%} |")
    return "\n".join(lines) + "\n"


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    """The curves of the largest batch, in its smallest micro-batches, of the first seed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "wholebatch"
    from matplotlib import pyplot

    first = max((r for r, _ in pairs(runs)), key=lambda r: (r["samples"], -r["micro"], -r["seed"]))
    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for way, width in (("exact", 2.6), ("moments", 1.0), ("proposed", 1.0)):
        micro = first["samples"] if way == "exact" else first["micro"]
        for run in runs:
            if same(run, {**first, "way": way, "micro": micro}):
                updates = range(1, len(run["losses"]) + 1)
                label = f"{WAYS[way]} ({end(run):.3f} in the end)"
                axes.plot(updates, run["losses"], color=COLOURS[way], label=label, lw=width)
    axes.set_xlabel("update")
    axes.set_ylabel("loss of the batch (nats per byte)")
    axes.set_title(
        f"bytes-gpt, batches of {first['samples']} in micro-batches of {first['micro']}", loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--samples", type=int, default=bytes_gpt.defaults["batch_size"])
    parser.add_argument("--micro", type=int, nargs="+", default=[bytes_gpt.defaults["micro_batch"]])
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--way", nargs="+", choices=WAYS, default=["exact", "moments", "proposed"])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--show", action="store_true", help="only write table and plot again")
    options = parser.parse_args()
    file = options.out / "benchmarks" / "adam_accumulation.json"
    image = options.out / "images" / "adam-accumulation.svg"
    file.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"device": DEVICE, "torch": torch.__version__, "runs": []}
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
    wanted = [
        row(way, options, micro, seed)
        for seed in options.seed
        for micro in options.micro
        for way in options.way
    ]
    for one in [] if options.show else wanted:
        if any(same(one, run) for run in found["runs"]):
            continue
        setting = {name: one[name] for name in ("updates", "samples", "micro", "seed")}
        began = time.perf_counter()
        made = as_proposed(**setting) if one["way"] == "proposed" else losses(one["way"], **setting)
        found["runs"].append({**one, "losses": [round(loss, 6) for loss in made]})
        print(
            f"{one}: {time.perf_counter() - began:.0f} s, {end(found['runs'][-1]):.4f}", flush=True
        )
        file.write_text(json.dumps(found) + "\n", encoding="utf-8")
    table = page(found["runs"])
    file.with_suffix(".md").write_text(table, encoding="utf-8")
    print(table)
    if importlib.util.find_spec("matplotlib") and any(pairs(found["runs"])):
        plot(found["runs"], image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
