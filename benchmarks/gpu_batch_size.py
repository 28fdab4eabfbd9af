"""Does a batch that follows the gradient noise and the decay learn as much in fewer updates?

    PYTHONPATH=src python3 benchmarks/gpu_batch_size.py [--model 124m] [--sequences N] [--out FILE]

Runs of bytes-gpt: a fixed small batch, a fixed large one, and `auto`, which begins with the large
batch (`--from small`: with the small one), doubles as the critical batch grows, and doubles where
the schedule halves the rate. `--runs` lists them as NAME:RATE:SEED or NAME:RATE:SEED:DATA: the rate
times the model's own, and the data times `--sequences`. The target of a seed is the lowest loss on
held-out bytes with which a large batch ends. The table has the updates and the data after which
each run has reached it. `seesaw` is `auto` with the square root alone for the rate, whatever the
share of the noise. On a GPU the runs go side by side, each in a process.

`--model tiny --sequences 4096` runs on a CPU in minutes. `--cost S` times what measuring the noise
adds to `auto`'s first and largest windows, for S seconds each, before the runs; `--sequences 0`
does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import wholebatch as wb
from wholebatch.cli.recipes import bytes_gpt
from wholebatch.tune.batch_scaling import Follow
from wholebatch.tune.learning_curves import Contender, Recipe, Take, learn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Size:
    """A model, its data and its batches, in sequences."""

    layers: int
    width: int
    heads: int
    context: int
    corpus: int
    small: int
    large: int
    rate: float
    """The learning rate for the large batch."""


SIZES = {
    "tiny": Size(2, 64, 4, 64, 8_000_000, 8, 32, 8e-3),
    "124m": Size(13, 896, 14, 512, 34_000_000, 4, 8, 2e-4),
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


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Warm up over a twentieth of the data, then decay by a cosine to a tenth."""

    def factor(done: int) -> float:
        through = max(0.0, (done / steps - 0.05) / 0.95)
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, through)))
        return min(1.0, (done + 1) / (0.05 * steps)) * decay

    return LambdaLR(optimizer, factor)


def recipe_of(size: Size, text: Tensor, seed: int, options: dict[str, Any]) -> Recipe:
    bytes_gpt.LAYERS, bytes_gpt.WIDTH, bytes_gpt.HEADS = size.layers, size.width, size.heads
    bytes_gpt.CONTEXT = size.context
    places = torch.arange(size.context + 1, device=DEVICE)
    count = (len(text) - 1) // size.context

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = bytes_gpt.model().to(DEVICE)
        optimizer = bytes_gpt.optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] = size.rate
        return model, optimizer

    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(DEVICE)

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
        return total / (HELD_OUT * size.context)

    return Recipe(
        make,
        bytes_gpt.loss,
        source,
        micro_batch=size.large,
        base_batch=size.large,
        schedule=schedule,
        options={"units": bytes_gpt.units, "clip_norm": 1.0, **options},
        held_out=held_out,
    )


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, of the device's work too; on a CPU, of the processor."""
    on_cuda = DEVICE.type == "cuda"
    clock = time.perf_counter if on_cuda else time.process_time
    if on_cuda:
        torch.cuda.synchronize()
    began = clock()
    call()
    if on_cuda:
        torch.cuda.synchronize()
    return clock() - began


def cost_of_noise(recipe: Recipe, size: Size, *, seconds: float) -> list[dict[str, float]]:
    """Time the first and the largest windows of `auto`; of three in turn, the second is measured.

    It has the norm after the first micro-batch and one more read at the close. The window after it
    may have a new estimate. Both are compared with the third, and no window is left out.
    """
    model, optimizer = recipe.make()
    micro_batch = size.large // 2
    train = wb.WholeBatch(
        model, optimizer, loss=recipe.loss, micro_batch=micro_batch, **recipe.options
    )
    train.measure_noise(3)
    take, found = recipe.source(), []
    for batch in (size.large, 8 * size.large):
        data = take(batch)

        def window(data: Any = data) -> None:
            train.step(data)
            _ = train.noise  # As a run asks for it.

        for _ in range(12):  # Graphs are made.
            window()
        times: tuple[list[float], ...] = [], [], []
        began = time.perf_counter()
        while time.perf_counter() < began + seconds or len(times[1]) < 8:
            for place in times:
                place.append(1000 * seconds_of(window))
        found.append(row_of_cost(train, batch, *times))
        print({name: round(value, 6) for name, value in found[-1].items()}, flush=True)
    return found


def row_of_cost(
    train: wb.WholeBatch, batch: int, plain: list[float], measured: list[float], after: list[float]
) -> dict[str, float]:
    """Return the extra time of a measured window, and its share where "auto" says how often."""
    extra = [a + b - 2 * less for less, a, b in zip(plain, measured, after, strict=True)]
    error = statistics.stdev(extra) / math.sqrt(len(extra))
    probe = train._probe
    assert probe is not None
    probe._every = "auto"
    every, window = probe._interval(), statistics.fmean(plain)
    probe._every = 3
    often = (24 + (1000 - 96) / every) / 1000  # The first 96 windows have 24.
    return {
        "batch": batch,
        "micro_batches": probe._measured()[-1].micro_batches,
        "rounds": len(extra),
        "window_ms": window,
        "extra_ms": statistics.fmean(extra),
        "extra_error_ms": error,
        "extra_median_ms": statistics.median(extra),
        "one_in": every,
        "share": statistics.fmean(extra) * often / window,
        "share_error": error * often / window,
    }


def run_one(run: str, recipe: Recipe, size: Size, given: argparse.Namespace) -> dict[str, Any]:
    """Make one run of `--runs`, and return its curve."""
    name, rate, _, data = [*run.split(":"), "1"][:4]
    fixed = {"small": size.small, "large": size.large}
    batch = fixed.get(name, fixed[given.start])
    contender = Contender(name, batch, rate=float(rate))
    if name == "seesaw":
        follow = Follow.set
        Follow.set = lambda self, batch, **_: follow(self, batch)  # type: ignore[method-assign]
    if name not in fixed:  # The noise needs two micro-batches.
        contender = replace(contender, largest=given.most * size.large)
        recipe = replace(recipe, micro_batch=batch // 2)

    def held_out(model: nn.Module) -> float:
        assert recipe.held_out is not None
        loss = recipe.held_out(model)
        print(f"{time.perf_counter() - BEGAN:.0f} s: {run}: {loss:.4f}", flush=True)
        return loss

    watched = replace(recipe, held_out=held_out)
    curve = learn(contender, watched, samples=int(float(data) * given.sequences))
    return {
        "run": run,
        "sizes": list(Counter(curve.sizes).items()),
        "updates": len(curve.updates),
        "held_out": [(made, seen, round(loss, 4)) for made, seen, loss in curve.held_out],
        "critical": [round(critical, 1) for critical in curve.critical],
        "training_loss": round(curve.loss, 4),
    }


def side_by_side(runs: list[str], together: int) -> list[dict[str, Any]]:
    """Make every run in a process of its own with this command's options, `together` at a time."""
    waiting = list(runs)
    alive: dict[str, Any] = {}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or alive:
            while waiting and len(alive) < together:
                run, path = waiting.pop(0), Path(folder, f"{len(waiting)}.json")
                command = [sys.executable, *sys.argv, "--only", run, "--out", str(path)]
                alive[run] = subprocess.Popen(command), path
            for run, (process, path) in list(alive.items()):
                if process.poll() is not None:
                    del alive[run]
                    if process.returncode == 0:
                        found[run] = json.loads(path.read_text(encoding="utf-8"))
                        print(f"{time.perf_counter() - BEGAN:.0f} s: {found[run]}", flush=True)
            time.sleep(0.2)
    return [found[run] for run in runs if run in found]


def table(found: list[dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    """Return a row for every run: when it has reached the target of its seed."""
    rows = []
    for one in found:
        name, times, seed, *_ = one["run"].split(":")
        ends = [
            (other["held_out"][-1][2], other["updates"])
            for other in found
            if other["run"].split(":")[::2] == ["large", seed]
        ]
        target, updates = min(ends, default=(0.0, 0))
        reached = next(((m, seen) for m, seen, loss in one["held_out"] if loss <= target), None)
        rows.append(
            {
                "run": name,
                "seed": int(seed),
                "rate": float(f"{rate * float(times):.3g}"),
                "batch": " → ".join(str(size) for size, _ in one["sizes"]),
                "updates": one["updates"],
                "sequences": sum(size * times for size, times in one["sizes"]),
                "held-out loss": one["held_out"][-1][2],
                "training loss": one["training_loss"],
                "updates to target": reached and reached[0],
                "of the large batch's": reached and f"{reached[0] / updates:.0%}",
                "sequences to target": reached and reached[1],
            }
        )
    return rows


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    on_cuda = DEVICE.type == "cuda"
    parser.add_argument("--model", choices=SIZES, default="124m" if on_cuda else "tiny")
    parser.add_argument("--sequences", type=int, default=16384, help="the data of each run")
    parser.add_argument("--runs", default="small:1:0,large:1:0,auto:1:0")
    parser.add_argument("--from", dest="start", choices=("small", "large"), default="large")
    parser.add_argument("--most", type=int, default=8, help="auto's limit, in large batches")
    parser.add_argument("--together", type=int, default=8 if on_cuda else 1)
    parser.add_argument("--execute", help="auto for the runs, and graph for --cost on a GPU")
    parser.add_argument("--cost", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--only", metavar="RUN", help="make this one alone")
    parser.add_argument("--out", type=Path, default=Path("batch_size.json"))
    return parser


def main() -> None:
    given = options().parse_args()
    size, on_cuda = SIZES[given.model], DEVICE.type == "cuda"
    result: dict[str, Any] = {}
    if given.only or given.cost:
        seed = int(given.only.split(":")[2]) if given.only else 0
        execute = given.execute or ("graph" if on_cuda and not given.only else "auto")
        how = {"precision": "bf16" if on_cuda else "full", "execute": execute}
        recipe = recipe_of(size, corpus(size.corpus), seed, how)
        if given.only:
            result = run_one(given.only, recipe, size, given)
        else:
            result["cost"] = cost_of_noise(recipe, size, seconds=given.cost)
    if given.only is None and given.sequences:
        result |= {
            "command": " ".join(["python", "benchmarks/gpu_batch_size.py", *sys.argv[1:]]),
            "context": size.context,
            "sequences": given.sequences,
            "device": torch.cuda.get_device_name() if on_cuda else "CPU",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        result["runs"] = side_by_side(given.runs.split(","), given.together)
        result["rows"] = table(result["runs"], size.rate)
        print(*result["rows"], sep="\n", flush=True)
    given.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
