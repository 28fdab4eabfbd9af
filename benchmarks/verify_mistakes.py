"""The mistakes that `wb.watch` names: planted in four kinds of models, by hand and in trainers.

    python benchmarks/verify_mistakes.py                       # plain torch
    python benchmarks/verify_mistakes.py --entry-point all            # and inside every trainer
    python benchmarks/verify_mistakes.py --entry-point Lightning --page

Every cell is one training run of three windows (the last one short), watched. A mistake must be
told by its name, and a right loop must be called right. `--time` prints what a watch costs instead,
as multiples of the window.
`--page` writes the rows of this run into docs/benchmarks/verify-mistakes.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ |= {"HF_HUB_OFFLINE": "1", "CI": "1"}

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import wholebatch as wb  # noqa: E402
from tests.verification.loops.live import (  # noqa: E402
    ENTRY_POINTS,
    KINDS,
    MISTAKES,
    STYLES,
    Plant,
    can_run,
    found_in,
    quiet,
    verdict_of,
)
from tests.verification.loops.right import RIGHT  # noqa: E402
from tests.verification.loops.unusual import UNUSUAL  # noqa: E402
from wholebatch.verification import ZOO  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "verify-mistakes.md"


def cells(entry_point: str, plants: dict[str, Plant]) -> dict[str, list[str]]:
    """Return the answers on every kind of model, by plant that this entry point has a place for."""
    table = {}
    for name, plant in plants.items():
        if can_run(entry_point, plant):
            kinds = ["language model"] if entry_point == "TRL" else list(KINDS)  # TRL has its own
            table[name] = [found_in(verdict_of(entry_point, kind, plant)) for kind in kinds]
            print(f"{entry_point:12} {name:26} {' '.join(table[name])}", flush=True)
    return table


def loops() -> dict[str, str]:
    """Return the answers on right loops of unusual styles, in plain torch."""
    found = {}
    for loop in [*UNUSUAL, *RIGHT]:
        model = ZOO["mlp"].model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with quiet(), wb.watch(model, optimizer) as watch:
            for count in (4, 4, 3):
                loop(model, optimizer, ZOO["mlp"].window(4, False, 0)[:count])
        found[loop.__name__] = found_in(watch.verdict)
        print(f"{'plain torch':12} {loop.__name__:26} {found[loop.__name__]}", flush=True)
    return found


def summary(table: dict[str, list[str]], plants: dict[str, Plant]) -> str:
    answers = [(plants[name].key, one) for name, row in table.items() for one in row]
    named = sum(wanted == one for wanted, one in answers)
    return f"{named} of {len(answers)}"


def versions(entry_point: str) -> str:
    """Return the day of this run, and the versions of torch and of the trainer."""
    packages = {"HF Trainer": "transformers", "Fabric": "lightning", "plain torch": ""}
    package = packages.get(entry_point, entry_point.lower())
    found = [f"{name} {metadata.version(name)}" for name in ("torch", package) if name]
    return f"{date.today()}, {', '.join(found)}"


def rows(entry_points: list[str]) -> dict[str, str]:
    """Return by entry point how many mistakes were named, and right loops called right."""
    found = {}
    for entry_point in entry_points:
        wrong = summary(cells(entry_point, MISTAKES), MISTAKES)
        right = summary(cells(entry_point, STYLES), STYLES)
        found[entry_point] = f"| {entry_point} | {wrong} | {right} | {versions(entry_point)} |"
    if "plain torch" in entry_points:
        answers = list(loops().values())
        right = f"{answers.count('right')} of {len(answers)}"
        name = "plain torch, loops of unusual styles"
        right += f", {answers.count('not judged')} not judged"
        found[name] = f"| {name} | | {right} | {versions('plain torch')} |"
    return found


def write(made: dict[str, str]) -> None:
    """Write these rows into the page, and keep its other rows."""
    old = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    names = [*ENTRY_POINTS, "plain torch, loops of unusual styles"]
    kept = {name: line for name in names for line in old if line.startswith(f"| {name} |")}
    table = [
        line for name, line in sorted({**kept, **made}.items(), key=lambda r: names.index(r[0]))
    ]
    kinds = ", ".join(KINDS)
    PAGE.write_text(
        "# Mistakes named by `wb.watch`\n\n"
        f"{len(MISTAKES)} mistakes and {len(STYLES)} right styles, each on {len(KINDS)} kinds of "
        f"models ({kinds}), in every entry\npoint that has a place for them. Written by "
        "`python benchmarks/verify_mistakes.py --entry-point NAME --page`.\n\n"
        "TRL trains a model and a loss of its own, so mistakes in the weights of a loss are "
        "planted in\n`tests/integrations/test_trl.py` instead. A loop in DeepSpeed has the loss "
        "alone: the engine clips, steps and clears.\n`tests/integrations/deepspeed_worker.py` has "
        'two weights with ZeRO 0 and two with ZeRO 3: each verdict is right or "not judged".\n\n'
        "| entry point | mistakes named | right styles with the wanted verdict "
        '(one is "not judged") | run with |\n'
        "|---|---|---|---|\n" + "\n".join(table) + "\n",
        encoding="utf-8",
    )


def _tokens(model: Any, x: Tensor, y: Tensor, total: int) -> list[Tensor]:
    """A mean over tokens."""
    return [F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / total]


def _pairs(model: Any, x: Tensor, y: Tensor, total: int) -> list[Tensor]:
    """A mean over pairs, of which one answer is preferred."""
    made = model(x).log_softmax(-1).gather(-1, y[..., None]).sum((1, 2))
    return [-F.logsigmoid(made[::2] - made[1::2]).sum() * y.shape[1] * 2 / total]


def _views(model: Any, x: Tensor, y: Tensor, total: int) -> list[Tensor]:
    """A mean over tokens, of two calls of the model."""
    both = (model(x).flatten(0, 1), model(x.flip(-1)).flatten(0, 1))
    losses = [F.cross_entropy(out, y.flatten(), reduction="sum") for out in both]
    return [torch.stack(losses).sum() / total]


def _contrasts(model: Any, x: Tensor, y: Tensor, total: int) -> list[Tensor]:
    """A loss that compares samples: a mistake."""
    rows = F.normalize(model(x).mean(1), dim=-1)
    return [F.cross_entropy(rows @ rows.T * 5, torch.arange(len(x))) / 4]


def _turns(model: Any, x: Tensor, y: Tensor, total: int) -> list[Tensor]:
    """Two backwards of every micro-batch."""
    out = model(x).flatten(0, 1)
    other = out.logsumexp(-1).square().sum() * 1e-4 / total
    return [F.cross_entropy(out, y.flatten(), reduction="sum") / total, other]


COSTS = {
    "mean over tokens": (_tokens, (4, 6, 2, 8)),
    "16 micro-batches": (_tokens, (2, 1) * 8),
    "pairs of answers": (_pairs, (4, 6, 2, 8)),
    "two calls": (_views, (4, 6, 2, 8)),
    "two backwards": (_turns, (4, 6, 2, 8)),
    "contrastive": (_contrasts, (5, 5, 5, 5)),
}


def cost(name: str) -> str:
    """Return what a watch of this loop takes beside the window: samples run, and processor time."""
    torch.manual_seed(0)
    losses, sizes = COSTS[name]
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(256, 200))
    optimizer = torch.optim.AdamW(model.parameters())
    micros = [(torch.randn(n, 64, 256), torch.randint(0, 200, (n, 64))) for n in sizes]
    total = sum(y.numel() for _, y in micros)
    ran = Counter[str]()

    def window() -> None:
        for x, y in micros:
            for loss in (made := losses(model, x, y, total)):
                loss.backward(retain_graph=loss is not made[-1])
        optimizer.step()
        optimizer.zero_grad()

    def timed() -> float:
        began = time.process_time()  # of the processor: others may be busy on the machine
        window()
        return time.process_time() - began

    def count(module: nn.Module, args: Any, out: Tensor) -> None:
        ran["forward"] += len(out)
        if out.requires_grad:
            out.register_hook(lambda slope: ran.update(backward=len(slope)))

    window()
    plain = min(timed() for _ in range(3))
    watched = []
    for _ in range(3):
        with quiet(), wb.watch(model, optimizer):
            watched.append(timed())
    counts = []
    with model[0].register_forward_hook(count):
        window()
        counts.append(Counter(ran))
        ran.clear()
        with quiet(), wb.watch(model, optimizer) as watch:
            window()
        counts.append(Counter(ran))
    with quiet(), wb.watch(model, optimizer):
        window()
        window()
        after = min(timed() for _ in range(3))
    passes = [f"{counts[1][one] / counts[0][one]:.1f}" for one in ("forward", "backward")]
    found = found_in(watch.verdict)
    times = f"{min(watched) / plain:.1f} | {after / plain:.2f}"
    return f"| {name} | {found} | {passes[0]} | {passes[1]} | {times} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entry-point", default="plain torch", choices=["all", *ENTRY_POINTS])
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    if options.time:
        print("| loop | found | samples forwards | samples backwards | time | windows after it |")
        print("|---|---|---|---|---|---|")
        for name in COSTS:
            print(cost(name), flush=True)
        return
    made = rows(list(ENTRY_POINTS) if options.entry_point == "all" else [options.entry_point])
    print("\n" + "\n".join(made.values()))
    if options.page:
        write(made)


if __name__ == "__main__":
    main()
