"""Exact BatchNorm on a GPU: ResNet-50, 256 images, bf16, channels last.

    python benchmarks/gpu_batchnorm.py                  # on CUDA; writes batchnorm.md
    python benchmarks/gpu_batchnorm.py --all            # eager and checkpointed code, too
    python benchmarks/gpu_batchnorm.py --one WholeBatch --profile
    python benchmarks/gpu_batchnorm.py --device cpu     # tries the file out, with tiny images

Each way runs in a process of its own. Time is the median of a window (forward, backward, update);
memory is the most that the allocator reserved after the warm-up. Both are also given relative to
torch.compile on the undivided batch. The page goes to $OUT if that is set, else to docs/benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from memory_models import resnet
from speed.device_time import mark, milliseconds, profiled_windows, shown
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.memory import with_checkpoints

Batch = dict[str, Tensor]
STARTS, PATIENCE = 8, 70
"""Seconds until "auto" has begun to compile, and to wait for what it compiles."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "torch.compile": {"compiled": True},
    "blocks checkpointed": {"checkpoints": True},
    "blocks checkpointed, torch.compile": {"checkpoints": True, "compiled": True},
    "WholeBatch": {"ours": True},
    "WholeBatch, eager": {"ours": True, "execute": "eager"},
    "WholeBatch, memory=6GiB": {"ours": True, "memory": "6GiB"},
    "WholeBatch, memory=6GiB, eager": {"ours": True, "memory": "6GiB", "execute": "eager"},
}
MAIN = ("torch.compile", "WholeBatch", "WholeBatch, memory=6GiB")


def loss(model: nn.Module, micro: Batch) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Callable[..., None]:
    def step(batch: Batch) -> None:
        with torch.autocast(device, torch.bfloat16) if device == "cuda" else nullcontext():
            F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(
    device: str, images: int, side: int, rounds: int, way: dict[str, Any], *, profiles: bool
) -> Any:
    """Return the median milliseconds of a window, GiB allocated and reserved, and notes."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    on_cuda = device == "cuda"
    model = resnet((3, 4, 6, 3)).to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=on_cuda)
    x = torch.randn(images, 3, side, side, device=device).to(memory_format=torch.channels_last)
    batch = {"x": x, "y": torch.randint(0, 1000, (images,), device=device)}
    note = ""
    if way.get("ours"):
        train = wb.WholeBatch(
            model,
            optimizer,
            loss=loss,
            precision="bf16" if on_cuda else "full",
            memory=way.get("memory") if on_cuda else None,
            execute=way.get("execute", "auto"),
        )
        step: Callable[..., object] = train.step
    else:
        if way.get("checkpoints"):
            with_checkpoints(model)
        run: Any = torch.compile(model) if way.get("compiled") else model
        step = plain(run, optimizer, device)
    began, left = time.perf_counter(), 8
    while left > 0:
        step(batch)
        left -= 1
        # Graphs are compiled beside the windows; what is compiled is recorded in the next one.
        waited = time.perf_counter() - began
        if way.get("ours") and (waited < STARTS or (train.compiling and waited < PATIENCE)):
            left = 4
        if on_cuda:
            torch.cuda.synchronize()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    marks = [mark()]  # By the device's clock: nothing waits between windows.
    for _ in range(rounds):
        step(batch)
        marks.append(mark())
    times = milliseconds(marks)
    if way.get("ours"):
        undivided = train._fitting._undivided
        assert undivided is not None
        note = f"{undivided.settings[undivided.place]}; {train._runner.executor.mode}"
    if profiles:
        stats = torch.cuda.memory_stats()
        print({name: stats[name] for name in ("num_alloc_retries", "num_ooms", "num_device_alloc")})
        print(shown(profiled_windows(lambda: step(batch))))
        if way.get("ours"):
            print("\n".join(train._runner.executor.notes.history))
    held = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if on_cuda else [0]
    return [statistics.median(times), *(one / 2**30 for one in held), note]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--all", action="store_true", help="all ways, not only the main ones")
    parser.add_argument("--one", help="measure this way alone, and print it as JSON")
    parser.add_argument("--profile", action="store_true", help="with --one: print its kernels")
    options = parser.parse_args()
    side = 224 if options.device == "cuda" else 32
    if options.one is not None:
        sizes = (options.images, side, options.rounds)
        way = WAYS[options.one]
        print(json.dumps(measure(options.device, *sizes, way, profiles=options.profile)))
        return
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    page = [
        "# Exact BatchNorm on a GPU",
        "",
        f"Written by `benchmarks/gpu_batchnorm.py` on {date.today()}: {machine}, torch "
        f"{torch.__version__}. ResNet-50, {options.images} images, bf16, channels last.",
        "",
        "| way | ms | GiB allocated | GiB reserved | time, memory / torch.compile | setting |",
        "|---|---:|---:|---:|---:|---|",
    ]
    compiled: list[float] | None = None
    for name in WAYS if options.all else MAIN:
        again = [sys.executable, __file__, "--one", name, "--device", options.device]
        again += ["--images", str(options.images), "--rounds", str(options.rounds)]
        ran = subprocess.run(again, capture_output=True, text=True)
        if ran.returncode:
            page.append(f"| {name} | failed: {ran.stderr.strip().splitlines()[-1][:120]} | | | | |")
        else:
            ms, *held, note = json.loads(ran.stdout.splitlines()[-1])
            used = [f"{one:.2f}" for one in held] if len(held) == 2 else ["", ""]
            if name == "torch.compile":
                compiled = [ms, *held]
            ratio = "" if compiled is None else f"{ms / compiled[0]:.2f}"
            if compiled is not None and len(held) == 2:
                ratio += f", {held[1] / compiled[2]:.2f}"
            page.append(f"| {name} | {ms:.1f} | {' | '.join(used)} | {ratio} | {note} |")
        print(page[-1], flush=True)
    folder = Path(os.environ.get("OUT", Path(__file__).parents[1] / "docs/benchmarks"))
    (folder / "batchnorm.md").write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
