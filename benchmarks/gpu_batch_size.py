"""Does a batch that follows the gradient noise learn as much in fewer updates? On bytes-gpt.

    PYTHONPATH=src python3 benchmarks/gpu_batch_size.py [--model 124m] [--sequences N] [--out FILE]

Three runs over the same data. `auto` begins with the small batch, doubles as the critical batch
grows, and doubles when the schedule has halved the rate. The fixed large batch is the one that
`auto` had in the middle of its data, before the rate was halved: what the noise advises. The third
is the fixed small batch. The target is the large batch's loss on held-out bytes at its end; the
table has the updates and the data after which each run has reached it. `--sequences` is the data of
each run; without it, that of `--seconds` of training. `--model tiny --seconds 12` runs on a CPU in
a minute. `--cost S` also times, for S seconds, what measuring the noise adds to a window;
`--sequences 0` does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
    base: int
    rate: float
    """The learning rate for a batch of `base`."""


SIZES = {
    "tiny": Size(2, 64, 4, 64, 8_000_000, 4, 8, 32, 4e-3),
    "124m": Size(13, 896, 14, 512, 16_000_000, 8, 16, 128, 1e-3),
}
HELD_OUT = 256  # sequences
BEGAN = time.perf_counter()


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

    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def pieces(chosen: Tensor) -> dict[str, Tensor]:
        found = text[chosen[:, None] * size.context + places].long()
        return {"tokens": found[:, :-1], "next": found[:, 1:]}

    def source() -> Take:
        taken = HELD_OUT

        def take(samples: int) -> dict[str, Tensor]:
            nonlocal taken
            assert taken + samples <= count, "more sequences than the corpus has"
            taken += samples
            return pieces(order[taken - samples : taken])

        return take

    @torch.no_grad()
    def held_out(model: nn.Module) -> float:
        total = 0.0
        for at in range(0, HELD_OUT, 32):
            micro = pieces(order[at : at + 32])
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
                total += float(bytes_gpt.loss(model, micro).total)
        found = total / (HELD_OUT * size.context)
        print(f"  {time.perf_counter() - BEGAN:.0f} s: held-out loss {found:.4f}", flush=True)
        return found

    return Recipe(
        make,
        bytes_gpt.loss,
        source,
        micro_batch=size.micro_batch,
        base_batch=size.base,
        schedule=bytes_gpt.scheduler,
        options={"units": bytes_gpt.units, "clip_norm": 1.0, **options},
        held_out=held_out,
    )


def time_of(call: Callable[[], Any], *, times: int) -> float:
    """Return the median time of a call in milliseconds, of the device's work too."""
    on_cuda = DEVICE.type == "cuda"
    clock = time.perf_counter if on_cuda else time.process_time
    found = []
    for _ in range(times):
        if on_cuda:
            torch.cuda.synchronize()
        began = clock()
        call()
        if on_cuda:
            torch.cuda.synchronize()
        found.append(1000 * (clock() - began))
    return statistics.median(found)


def cost_of_noise(recipe: Recipe, batch: int, *, seconds: float) -> dict[str, float]:
    """Return the time of a window, and of the part alone that a measured window has more.

    That part is the norm after the first micro-batch, and the estimate, which is not made anew in
    every measured window.
    """
    model, optimizer = recipe.make()
    train = wb.WholeBatch(
        model, optimizer, loss=recipe.loss, micro_batch=recipe.micro_batch, **recipe.options
    )
    train.measure_noise(2)
    data = recipe.source()(batch)
    parts: list[float] = []
    asked: list[float] = []

    def measured(done: int, of: int) -> None:
        if done == of:  # The gradients are there; the norm of all is the norm of the first.
            assert train._probe is not None
            parts.append(time_of(train._probe._norm_so_far, times=5))

    began = time.perf_counter()
    while time.perf_counter() < began + seconds or len(parts) < 8:
        train.step(data, after_micro=measured)
        asked.append(time_of(lambda: train.noise, times=1))
    window = time_of(lambda: train.step(data), times=9)
    norm = statistics.median(parts[len(parts) // 2 :])
    estimate = 2 * statistics.fmean(asked)  # One window in two was measured.
    return {
        "batch": batch,
        "window_ms": window,
        "norm_ms": norm,
        "estimate_ms": estimate,
        "share_of_one_in_four": (norm + estimate) / 4 / window,
    }


def row_of(curve: LearningCurve, target: float) -> dict[str, Any]:
    reached = next(((made, seen) for made, seen, loss in curve.held_out if loss <= target), None)
    grown = dict.fromkeys(curve.sizes)
    return {
        "run": curve.contender.name,
        "batch": " → ".join(map(str, grown)),
        "updates": len(curve.updates),
        "held-out loss": round(curve.held_out[-1][2], 4),
        "training loss": round(curve.loss, 4),
        "updates to target": reached and reached[0],
        "sequences to target": reached and reached[1],
        "seconds": round(curve.seconds, 1),
        "peak": bytes_said(curve.peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", choices=SIZES, default="124m" if DEVICE.type == "cuda" else "tiny"
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--large", type=int, help="instead of what auto had in the middle")
    parser.add_argument("--execute", default="auto")
    parser.add_argument("--cost", type=float, default=0.0, metavar="SECONDS")
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
        "context": size.context,
        "rate": size.rate,
        "device": where,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"bytes-gpt, {count:,} parameters, {precision}, {where}", flush=True)
    samples = given.sequences
    if samples is None:
        samples = samples_in(given.seconds, recipe, size.base)
    result["sequences"] = samples
    print(f"{samples:,} sequences of {size.context} bytes in each run", flush=True)
    for _ in compare(recipe, size, samples, given.large, result) if samples else ():
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if given.cost:
        cost = result["cost"] = cost_of_noise(recipe, 4 * size.small, seconds=given.cost)
        print({name: round(value, 6) for name, value in cost.items()}, flush=True)
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def compare(
    recipe: Recipe, size: Size, samples: int, large: int | None, result: dict[str, Any]
) -> Iterator[None]:
    """Make the three runs, and put their rows and curves into the result after each."""

    def run(name: str, batch: int, largest: int | None = None) -> LearningCurve:
        print(f"{name}, {time.perf_counter() - BEGAN:.0f} s", flush=True)
        curve = learn(Contender(name, batch, largest=largest), recipe, samples=samples)
        curves = result.setdefault("curves", {})
        curves[name] = [(made, seen, round(loss, 4)) for made, seen, loss in curve.held_out]
        print(f"  updates, sequences, held-out loss: {curves[name]}", flush=True)
        print(f"  sizes: {Counter(curve.sizes)}, {curve.seconds:.0f} s", flush=True)
        return curve

    auto = run("auto", size.small, largest=32 * size.small)
    middle = next(
        s for s, u in zip(auto.sizes, auto.updates, strict=True) if u.samples >= samples / 2
    )
    yield
    fixed = run("large", large or max(middle, 2 * size.small))
    result["rows"] = [row_of(curve, fixed.held_out[-1][2]) for curve in (fixed, auto)]
    print(*result["rows"], sep="\n", flush=True)
    made = result["rows"][1]["updates to target"]
    if made:
        ratio = made / len(fixed.updates)
        print(f"auto reaches the loss of large in {ratio:.2f} of the updates of large", flush=True)
    yield
    small = run("small", size.small)
    result["rows"].append(row_of(small, fixed.held_out[-1][2]))
    print(result["rows"][-1], flush=True)
    yield


if __name__ == "__main__":
    main()
