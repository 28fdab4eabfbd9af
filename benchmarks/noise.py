"""What measuring the gradient noise scale costs: windows with and without it, in turn.

    python benchmarks/noise.py [--cuda] [--json PATH] [--markdown PATH]

Two runs of the same model make the same windows in turn, one with `noise=8` ("auto" for windows of
8 micro-batches), one without. A round is eight windows of each, one of them measured. On the CPU
the time is the process's own (one thread), so that other work on the machine is not counted; on
CUDA it is that of the clock, with the device waited for.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.options import grouped

EVERY = 8
LIMIT = 0.01


@dataclass(frozen=True)
class Case:
    """A model, its batch, and how long to look at it."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], wb.Loss]
    micro_batch: int
    rounds: int
    options: dict[str, Any]


def mlp(inputs: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def classified(model: Any, micro: Any) -> wb.Loss:
    return wb.cross_entropy(model(micro[0]), micro[1])


def points(number: int, inputs: int) -> tuple[Tensor, Tensor]:
    return torch.randn(number, inputs), torch.randint(0, 10, (number,))


def on_cpu() -> dict[str, Case]:
    from wholebatch.cli.recipes.recipe import load_recipe

    recipe = load_recipe("bytes-gpt")
    corpus = recipe.build_data()
    sequences = torch.utils.data.default_collate([corpus[index] for index in range(32)])
    size = int(recipe.defaults["micro_batch"])
    return {
        "tiny MLP (32-64-64-10), 8 micro-batches of 8": Case(
            lambda: mlp(32, 64), lambda: points(64, 32), classified, 8, 60, {}
        ),
        "MLP (1024-2048-2048-10), 8 micro-batches of 8": Case(
            lambda: mlp(1024, 2048), lambda: points(64, 1024), classified, 8, 8, {}
        ),
        f"bytes-gpt, {32 // size} micro-batches of {size}": Case(
            recipe.build_model, lambda: sequences, recipe.loss, size, 5, {}
        ),
    }


def on_cuda() -> dict[str, Case]:
    from speed.models import GPT

    def model() -> nn.Module:
        torch.manual_seed(0)
        return GPT(12, 768, 12, 50304, 1024).cuda()

    def loss(model: Any, micro: Tensor) -> wb.Loss:
        logits = model(micro[:, :-1])
        return wb.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten())

    def batch() -> Tensor:
        return torch.randint(0, 50304, (16, 1025), device="cuda")

    return {
        f"GPT 163M, {16 // size} micro-batches of {size} × 1024, {execute}": Case(
            model, batch, loss, size, 4, {"precision": "bf16", "execute": execute}
        )
        for size, execute in ((1, "graph"), (4, "graph"), (1, "eager"), (4, "eager"))
    }


def run_of(case: Case, noise: int | None) -> tuple[wb.WholeBatch, Any, bool]:
    model = case.model()
    fused = next(model.parameters()).is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=case.loss,
        clip_norm=1.0,
        **grouped({"micro_batch": case.micro_batch, **case.options}),
    )
    if noise is not None:
        train.measure_noise(noise)
    return train, case.batch(), fused


def time_of(train: wb.WholeBatch, batch: Any, on_cuda: bool) -> float:
    clock = time.process_time
    if on_cuda:
        clock = time.perf_counter
        torch.cuda.synchronize()
    start = clock()
    train.step(batch)
    _ = train.noise  # as whoever logs it asks for it after every window
    if on_cuda:
        torch.cuda.synchronize()
    return clock() - start


def measure_case(case: Case) -> dict[str, float]:
    runs = {name: run_of(case, noise) for name, noise in (("without", None), ("with", EVERY))}
    rounds: dict[str, list[float]] = {name: [] for name in runs}
    measured: list[float] = []
    plain: list[float] = []
    for round_ in range(case.rounds + 1):
        times: dict[str, list[float]] = {name: [] for name in runs}
        for window in range(EVERY):
            for name in list(runs)[:: 1 if window % 2 else -1]:  # neither is always first
                times[name].append(time_of(*runs[name]))
        if round_ == 0:  # graphs are made, memory is taken
            continue
        for name, seconds in times.items():
            rounds[name].append(sum(seconds))
        plain.append(statistics.median(times["without"]))
        # Of every eight windows the second is measured, and the estimate is made in the third.
        measured.append(sum(times["with"][1:3]) - sum(times["without"][1:3]))
    estimate = runs["with"][0].noise
    assert estimate is not None
    assert estimate.samples >= 0.8 * case.rounds
    extra = statistics.median(measured) / statistics.median(plain)
    ratios = [b / a for a, b in zip(rounds["without"], rounds["with"], strict=True)]
    return {
        "window_ms": 1e3 * statistics.median(plain),
        "measured_window_extra": extra,
        "overhead": extra / EVERY,
        "overhead_of_rounds": statistics.median(ratios) - 1.0,
    }


def measure(*, cuda: bool) -> Iterator[dict[str, Any]]:
    """What is known after each case: a run that is cut short leaves those that it had."""
    results: dict[str, dict[str, float]] = {}
    where = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, one thread"
    for name, case in (on_cuda() if cuda else on_cpu()).items():
        results[name] = measure_case(case)
        print(name, {key: round(value, 4) for key, value in results[name].items()}, flush=True)
        yield {
            "every": EVERY,
            "torch": torch.__version__,
            "where": where,
            "date": time.strftime("%Y-%m-%d"),
            "results": dict(results),
        }


def markdown(tables: list[dict[str, Any]]) -> str:
    lines = [
        "# The cost of measuring the gradient noise scale",
        "",
        f"`python benchmarks/noise.py`. One window in {EVERY} is measured. The overhead is a "
        f"measured window's extra time divided by {EVERY}; the limit is {LIMIT:.0%}. *Of whole "
        "rounds* is the same, from the time of all windows with and without it, which scatters "
        "with everything else that happens on the machine.",
        "",
        "| where | case | a window, ms | extra in a measured window | overhead | of whole rounds |",
        "|---|---|---|---|---|---|",
    ]
    for table in tables:
        for name, row in table["results"].items():
            lines.append(
                f"| {table['where']}, torch {table['torch']}, {table['date']} | {name} | "
                f"{row['window_ms']:.1f} | {row['measured_window_extra']:+.1%} | "
                f"{row['overhead']:+.2%} | {row['overhead_of_rounds']:+.2%} |"
            )
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    folder = Path(__file__).parents[1] / "docs" / "benchmarks"
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--json", type=Path, default=folder / "noise.json")
    parser.add_argument("--markdown", type=Path, default=folder / "noise.md")
    arguments = parser.parse_args()
    if not arguments.cuda:
        torch.set_num_threads(1)
    kept: dict[str, Any] = {}
    if arguments.json.exists():
        kept = json.loads(arguments.json.read_text(encoding="utf-8"))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    too_much = False
    for measured in measure(cuda=arguments.cuda):
        kept["cuda" if arguments.cuda else "cpu"] = measured
        text = markdown([kept[key] for key in ("cpu", "cuda") if key in kept])
        arguments.json.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        arguments.markdown.write_text(text, encoding="utf-8")
        too_much = any(row["overhead"] > LIMIT for row in measured["results"].values())
    print(arguments.markdown.read_text(encoding="utf-8"))
    return int(too_much)


if __name__ == "__main__":
    sys.exit(main())
