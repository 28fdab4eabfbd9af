"""Does a batch that follows the gradient noise learn as much in fewer updates? On bytes-gpt.

    PYTHONPATH=src python3 benchmarks/gpu_batch_size.py [--model 124m] [--seconds 60] [--out FILE]

Three runs over the same data: a fixed small batch, a fixed large one, and `auto`, which begins
with the small one and doubles as the critical batch grows. `--seconds` is the training time of
each. The target is the loss of the fixed large batch over the last tenth of its data; the table
has the updates and the data after which each run has reached it. `--model tiny --seconds 12` runs
on a CPU in a minute. `--cost` also times windows with and without the noise scale; `--seconds 0`
does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.cli.recipes import bytes_gpt
from wholebatch.core.readable_sizes import bytes_said
from wholebatch.tune.learning_curves import (
    Contender,
    LearningCurve,
    Recipe,
    Take,
    learn,
    samples_in,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Size:
    """A model, its data and its batches, in sequences."""

    layers: int
    width: int
    heads: int
    context: int
    corpus: int
    micro_batch: int
    small: int
    large: int
    rate: float
    """The learning rate for the large batch."""


SIZES = {
    "tiny": Size(3, 128, 4, 64, 8_000_000, 2, 8, 64, 4e-3),
    "30m": Size(9, 512, 8, 512, 60_000_000, 8, 16, 128, 1.5e-3),
    "124m": Size(13, 896, 14, 512, 120_000_000, 8, 16, 128, 1e-3),
}


def corpus(most: int) -> Tensor:
    """Return the bytes of Python sources: the standard library, then what is installed."""
    text = bytearray()
    for root in dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib")):
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(set(folders) - {"test", "tests", "__pycache__"})
            for name in sorted(files):
                if name.endswith(".py") and len(text) < most:
                    text += Path(folder, name).read_bytes() + b"\n"
    return torch.frombuffer(text[:most], dtype=torch.uint8).clone().to(DEVICE)


def recipe_of(size: Size, text: Tensor, options: dict[str, Any]) -> Recipe:
    bytes_gpt.LAYERS, bytes_gpt.WIDTH, bytes_gpt.HEADS = size.layers, size.width, size.heads
    bytes_gpt.CONTEXT = size.context
    places = torch.arange(size.context + 1, device=DEVICE)
    count = (len(text) - 1) // size.context

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = bytes_gpt.model().to(DEVICE)
        optimizer = bytes_gpt.optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] = size.rate
        return model, optimizer

    def source() -> Take:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        taken = 0

        def take(samples: int) -> dict[str, Tensor]:
            nonlocal taken
            chosen = order[torch.arange(taken, taken + samples, device=DEVICE) % count]
            taken += samples
            pieces = text[chosen[:, None] * size.context + places].long()
            return {"tokens": pieces[:, :-1], "next": pieces[:, 1:]}

        return take

    return Recipe(
        make,
        bytes_gpt.loss,
        source,
        micro_batch=size.micro_batch,
        base_batch=size.large,
        schedule=bytes_gpt.scheduler,
        options={"units": bytes_gpt.units, "clip_norm": 1.0, **options},
    )


def cost_of_noise(recipe: Recipe, batch: int, *, windows: int = 24) -> dict[str, float]:
    """Return the time of a window, and what one that is measured takes more."""
    model, optimizer = recipe.make()
    train = wb.WholeBatch(
        model, optimizer, loss=recipe.loss, micro_batch=recipe.micro_batch, **recipe.options
    )
    train.measure_noise(2)
    data = recipe.source()(batch)
    times: tuple[list[float], list[float]] = ([], [])
    on_cuda = DEVICE.type == "cuda"
    clock = time.perf_counter if on_cuda else time.process_time
    for window in range(windows):
        if on_cuda:
            torch.cuda.synchronize()
        began = clock()
        train.step(data)
        _ = train.noise
        if on_cuda:
            torch.cuda.synchronize()
        if window >= windows // 3:
            times[window % 2].append(clock() - began)
    plain, measured = map(statistics.median, times)
    return {
        "batch": batch,
        "window_ms": 1000 * plain,
        "measured_ms": 1000 * measured,
        "overhead_of_one_in_four": (measured / plain - 1) / 4,
    }


def row_of(curve: LearningCurve, target: float) -> dict[str, Any]:
    reached = curve.reaches(target) or (None, None)
    grown = dict.fromkeys(curve.sizes)
    return {
        "run": curve.contender.name,
        "batch": " → ".join(map(str, grown)),
        "updates": len(curve.updates),
        "loss": round(curve.loss, 4),
        "updates to target": reached[0],
        "sequences to target": reached[1],
        "seconds": round(curve.seconds, 1),
        "peak": bytes_said(curve.peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", choices=SIZES, default="124m" if DEVICE.type == "cuda" else "tiny"
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--execute", default="auto")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("batch_size.json"))
    given = parser.parse_args()
    size = SIZES[given.model]
    precision = "bf16" if DEVICE.type == "cuda" else "full"
    recipe = recipe_of(
        size, corpus(size.corpus), {"precision": precision, "execute": given.execute}
    )
    count = sum(p.numel() for p in recipe.make()[0].parameters())
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    result: dict[str, Any] = {
        "model": given.model,
        "parameters": count,
        "device": where,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"bytes-gpt, {count:,} parameters, {precision}, {where}", flush=True)
    if given.cost:
        cost = result["cost"] = cost_of_noise(recipe, 4 * size.micro_batch)
        print({name: round(value, 5) for name, value in cost.items()}, flush=True)
    if not given.seconds:
        return
    samples = samples_in(given.seconds, recipe, size.large)
    result["sequences"] = samples
    print(f"{samples:,} sequences of {size.context} bytes in each run", flush=True)
    curves = []
    for contender in (
        Contender("large", size.large),
        Contender("small", size.small),
        Contender("auto", size.small, largest=4 * size.large),
    ):
        curves.append(learn(contender, recipe, samples=samples))
        result["rows"] = [row_of(curve, curves[0].loss) for curve in curves]
        result["curves"] = {c.contender.name: c.points() for c in curves}
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(result["rows"][-1], flush=True)
    small, auto = result["rows"][1:]
    for name, row in (("small", small), ("large", result["rows"][0])):
        if auto["updates to target"] and row["updates to target"]:
            ratio = auto["updates to target"] / row["updates to target"]
            print(f"auto reaches the loss of large in {ratio:.2f} of the updates of {name}")
    made = auto["updates"] / small["updates"]
    print(
        f"auto made {made:.2f} of the updates of small: loss {auto['loss']}, small {small['loss']}"
    )


if __name__ == "__main__":
    main()
