"""The cost of the library itself: a window through Accumulator beside the bare hand-written loop.

    python benchmarks/overhead.py [--json PATH] [--markdown PATH]

Both loops run in one process, in turn, on the same model and data; each figure is the median over
rounds of the time of one window. The bare loop is what people write: mean loss, divided by the
number of steps, backward, clip, step, zero_grad. A second table has the cost of measuring the
gradient noise scale, by the processor's time: windows with and without it, in turn.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from wholebatch.tune import NoiseProbe

STEPS = 32
EVERY = 8
CASES: dict[str, dict[str, int]] = {
    "tiny MLP (32-64-64-10), micro-batch 8": {
        "width": 64,
        "inputs": 32,
        "samples": 8,
        "rounds": 60,
    },
    "MLP (1024-2048-2048-10), micro-batch 64": {
        "width": 2048,
        "inputs": 1024,
        "samples": 64,
        "rounds": 15,
    },
}


def model_of(inputs: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def bare(
    model: nn.Module, optimizer: torch.optim.Optimizer, micros: list[Any], clip: float | None
) -> None:
    for i, (x, y) in enumerate(micros):
        loss = functional.cross_entropy(model(x), y) / STEPS
        loss.backward()
        if (i + 1) % STEPS == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def ours(model: nn.Module, acc: wb.Accumulator, micros: list[Any]) -> None:
    for x, y in acc.over(micros):
        acc.backward(functional.cross_entropy(model(x), y, reduction="sum"), units=len(y))


def time_of(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_case(
    *, inputs: int, width: int, samples: int, rounds: int, clip: float | None
) -> dict[str, float]:
    micros: list[tuple[Tensor, Tensor]] = [
        (torch.randn(samples, inputs), torch.randint(0, 10, (samples,))) for _ in range(STEPS)
    ]
    plain, accumulated = model_of(inputs, width), model_of(inputs, width)
    optimizer = torch.optim.AdamW(plain.parameters())
    acc = wb.Accumulator(
        accumulated, torch.optim.AdamW(accumulated.parameters()), steps=STEPS, clip_norm=clip
    )
    runs = {
        "bare": lambda: bare(plain, optimizer, micros, clip),
        "wholebatch": lambda: ours(accumulated, acc, micros),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 2):
        for name in list(runs)[:: 1 if round_ % 2 else -1]:  # neither is always first
            seconds = time_of(runs[name])
            if round_ >= 2:
                times[name].append(seconds)
    ratios = [b / a for a, b in zip(times["bare"], times["wholebatch"], strict=True)]
    return {
        "bare_ms": 1e3 * statistics.median(times["bare"]),
        "wholebatch_ms": 1e3 * statistics.median(times["wholebatch"]),
        "micro_step_ms": 1e3 * statistics.median(times["bare"]) / STEPS,
        "ratio": statistics.median(ratios),
    }


def noise_cost(*, inputs: int, width: int, samples: int, rounds: int) -> dict[str, float]:
    """Return the ms of a window, and the share that measuring one window in 8 adds."""
    batch = torch.randn(8 * samples, inputs), torch.randint(0, 10, (8 * samples,))
    runs = []
    for every in (None, EVERY):
        model = model_of(inputs, width)
        train = wb.WholeBatch(
            model,
            torch.optim.AdamW(model.parameters()),
            loss=lambda model, micro: wb.cross_entropy(model(micro[0]), micro[1]),
            micro_batch=samples,
            clip_norm=1.0,
        )
        runs.append((train, None if every is None else NoiseProbe(train, every)))
    plain, extra = [], []
    for round_ in range(rounds + 1):
        times: list[list[float]] = [[], []]
        for window in range(EVERY):
            for which in (0, 1) if window % 2 else (1, 0):
                start = time.process_time()
                train, noise = runs[which]
                train.step(batch)
                _ = noise and noise.estimate  # who logs it asks for it after every window
                times[which].append(time.process_time() - start)
        if round_:
            plain.append(statistics.median(times[0]))
            # Of every eight windows the second is measured; the estimate is made in the third.
            extra.append(sum(times[1][1:3]) - sum(times[0][1:3]))
    added = statistics.median(extra) / statistics.median(plain)
    return {"window_ms": 1e3 * statistics.median(plain), "overhead": added / EVERY}


def measure() -> dict[str, Any]:
    results = {}
    for name, case in CASES.items():
        for clip in (None, 1.0):
            label = f"{name}, {'clipped' if clip else 'no clipping'}"
            results[label] = measure_case(**case, clip=clip)
    return {
        "steps": STEPS,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "date": time.strftime("%Y-%m-%d"),
        "results": results,
        "noise": {
            name.replace("micro-batch", "8 micro-batches of"): noise_cost(**case)
            for name, case in CASES.items()
        },
    }


def markdown(measured: dict[str, Any]) -> str:
    lines = [
        "# The cost of the library itself",
        "",
        f"A window of {measured['steps']} micro-batches; `python benchmarks/overhead.py`, "
        f"{measured['date']}, CPU ({measured['machine']}, {measured['threads']} threads), "
        f"torch {measured['torch']}. The ratio is the median over rounds that ran in turn.",
        "",
        "| case | micro-step | bare loop, ms | Accumulator, ms | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, row in measured["results"].items():
        lines.append(
            f"| {name} | {row['micro_step_ms']:.2f} ms | {row['bare_ms']:.1f} | "
            f"{row['wholebatch_ms']:.1f} | {row['ratio']:.3f} |"
        )
    lines += [
        "",
        "## Measuring the gradient noise scale",
        "",
        f"One window in {EVERY} is measured; processor time.",
        "",
        "| case | a window, ms | overhead |",
        "|---|---|---|",
    ]
    for name, row in measured["noise"].items():
        lines.append(f"| {name} | {row['window_ms']:.1f} | {row['overhead']:+.2%} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    folder = Path(__file__).parents[1] / "docs" / "benchmarks"
    parser.add_argument("--json", type=Path, default=folder / "overhead.json")
    parser.add_argument("--markdown", type=Path, default=folder / "overhead.md")
    arguments = parser.parse_args()
    measured = measure()
    print(markdown(measured))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(measured, indent=2) + "\n")
    arguments.markdown.write_text(markdown(measured))


if __name__ == "__main__":
    main()
