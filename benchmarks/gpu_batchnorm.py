"""Exact BatchNorm on a GPU: a ResNet-50, 256 images in micro-batches of 16, held in every way.

Time and memory of one window, forward and backward, beside those of the whole batch and of plain
(wrong) micro-batching, all in one run; the traffic of `hold="host"` beside what the link can do;
and its peak from 64 to 1,024 images.

    python benchmarks/gpu_batchnorm.py                   # on CUDA; writes batchnorm.md and .json
    python benchmarks/gpu_batchnorm.py --parts peaks     # only a part of it
    python benchmarks/gpu_batchnorm.py --merge A B       # one page of the .json files of two runs
    python benchmarks/gpu_batchnorm.py --device cpu      # tries the file out, with tiny images

Pages go to $OUT if that is set, else to docs/benchmarks. They are written after every row.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from batchnorm_page import page
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch.coupled import batchnorms
from wholebatch.coupled.batchnorm.lock_step import Hold, blocks_of
from wholebatch.coupled.normalisation_layers import replace_forward
from wholebatch.runner import LockStepRunner

Pair = tuple[Tensor, Tensor]
Window = Callable[[], object]
MIB = 2**20


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * 4
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.short = nn.Identity()
        if stride != 1 or inside != out:
            short = nn.Conv2d(inside, out, 1, stride, bias=False)
            self.short = nn.Sequential(short, nn.BatchNorm2d(out))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.short(x), inplace=True)


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
    ]
    inside = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            layers.append(Bottleneck(inside, width, stride if index == 0 else 1))
            inside = width * 4
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000)]
    return nn.Sequential(*layers)


def loss(model: nn.Module, pair: Pair) -> wb.Loss:
    return wb.Loss(F.cross_entropy(model(pair[0]), pair[1], reduction="sum"), pair[1].numel())


@dataclass
class Lab:
    """The model, the images, and how they are measured."""

    device: str
    batch: int
    micro: int
    side: int
    rounds: int

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self.model = resnet50().to(self.device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.blocks = blocks_of(self.model)

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def images(self, number: int) -> Pair:
        """On the host, pinned where there is a device to copy them to."""
        x = torch.randn(number, 3, self.side, self.side)
        x, y = x.contiguous(memory_format=torch.channels_last), torch.randint(0, 1000, (number,))
        return (x.pin_memory(), y.pin_memory()) if self.on_cuda else (x, y)

    def plain(self, pair: Pair, micro: int, *, again: bool) -> Window:
        """Micro-batches one by one, each normalised by itself; blocks computed again or not."""
        parts = list(zip(pair[0].split(micro), pair[1].split(micro), strict=True))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

        def window() -> None:
            replaced = ExitStack()
            for _, block in self.blocks if again else ():
                run = partial(checkpoint, block.forward, use_reentrant=False)
                replace_forward(replaced, block, run)
            for part in parts:
                x, y = (tensor.to(self.device, non_blocking=True) for tensor in part)
                with torch.autocast(self.device, dtype=torch.bfloat16):
                    total = loss(self.model, (x, y)).total
                (total / len(pair[1])).backward()
            replaced.close()
            optimizer.step()
            optimizer.zero_grad()

        return window

    def exact(self, hold: Hold, execute: str) -> wb.WholeBatch:
        self.model.zero_grad(set_to_none=True)
        # A learning rate of zero: every way measures the same model.
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        return wb.WholeBatch(
            self.model,
            optimizer,
            loss=loss,
            micro_batch=self.micro,
            precision="bf16",
            execute=execute,  # type: ignore[arg-type]
            batchnorm=wb.BatchNorm("exact", hold=hold),
        )

    def measured(
        self, window: Window, *, warm: int, rounds: int | None = None, recorded: bool = False
    ) -> dict[str, float]:
        """Milliseconds (median), and MiB beyond what was there: allocated, and of the driver.

        A replay allocates nothing, so the peak of a recording is that of making it.
        """
        self.empty()
        before, reserved, driver = self.used()
        times = []
        for index in range((rounds or self.rounds) + warm):
            if index == (0 if recorded else warm) and self.on_cuda:
                torch.cuda.reset_peak_memory_stats()
            self.wait()
            start = time.perf_counter()
            window()
            self.wait()
            times.append((time.perf_counter() - start) * 1e3)
        found = {"ms": statistics.median(times[warm:])}
        if self.on_cuda:
            found["allocated"] = (torch.cuda.max_memory_allocated() - before) / MIB
            found["reserved"] = (torch.cuda.max_memory_reserved() - reserved) / MIB
            found["driver"] = (self.used()[2] - driver) / MIB
        return found

    def used(self) -> tuple[int, int, int]:
        if not self.on_cuda:
            return 0, 0, 0
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def empty(self) -> None:
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        self.wait()
        if self.on_cuda:
            torch.cuda.empty_cache()


def link() -> dict[str, float]:
    """GB/s of the host link: out and in alone, and both ways at once."""
    size, times = 1 << 28, 6
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found = {}
    for name, ways in (("out", (0,)), ("in", (1,)), ("both", (0, 1))):
        for _ in range(2):  # the first to warm up
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(times):
                for way in ways:
                    target, source = (host, device) if way == 0 else (device, host)
                    with torch.cuda.stream(streams[way]):
                        target[way].copy_(source[way], non_blocking=True)
            torch.cuda.synchronize()
            took = time.perf_counter() - start
        found[name] = times * size * len(ways) / took / 1e9
    return found


# ------------------------------------------------------------------------------------- the rows


def compare(lab: Lab, found: dict[str, Any], note: Callable[[], None], *, exact: bool) -> None:
    """One window of every way; without `exact` only of those that others are compared with."""
    pair = lab.images(lab.batch)
    rows: dict[str, Any] = found.setdefault("ways", {})

    def row(name: str, window: Window, *, warm: int = 2, rounds: int | None = None) -> None:
        recorded = "recorded" in name
        try:
            rows[name] = lab.measured(window, warm=warm, rounds=rounds, recorded=recorded)
        except torch.OutOfMemoryError:
            rows[name] = {}
        lab.empty()
        print(f"{name:55}", *(f"{k} {v:.1f}" for k, v in rows[name].items()), flush=True)
        note()

    whole, micro = lab.batch, lab.micro
    row("whole batch", lab.plain(pair, whole, again=False))
    row("whole batch, blocks again", lab.plain(pair, whole, again=True))
    row("plain micro-batches (wrong)", lab.plain(pair, micro, again=False), rounds=3)
    row("plain micro-batches, blocks again (wrong)", lab.plain(pair, micro, again=True), rounds=3)
    if not exact:
        return
    holds: tuple[Hold, ...] = ("inputs", "host", "graphs")
    for hold in holds:
        train = lab.exact(hold, "graph" if lab.on_cuda else "eager")
        step = partial(train.step, pair)
        lab.empty()
        name = f'exact, hold="{hold}"'
        # The first window runs by threads and is recorded; the others are replays.
        row(f"{name}, recorded", step, warm=2)
        runner = train._runner
        assert isinstance(runner, LockStepRunner)
        rows[f"{name}, recorded"]["mode"] = runner.recorder.mode
        traffic = runner._lock_step.traffic
        if traffic is not None:
            rows[f"{name}, recorded"].update(out=traffic.bytes_out, back=traffic.bytes_in)
        del train, step
        train = lab.exact(hold, "eager")
        row(f"{name}, by threads", partial(train.step, pair), warm=1, rounds=1)
        del train
        note()


def peaks(
    lab: Lab,
    found: dict[str, Any],
    sizes: Sequence[int],
    note: Callable[[], None],
    *,
    threads: bool,
) -> None:
    """What hold="host" needs as the batch grows: recorded, and by `threads`."""
    rows: dict[str, Any] = found.setdefault("peaks", {})
    few = sizes[:2]  # by threads a large window takes long; the first of a recording is one too
    ways = [*(["graph"] if lab.on_cuda else []), *(["eager"] if threads else [])]
    for execute in ways:
        for size in sizes if execute == "graph" else few:
            pair = lab.images(size)
            train = lab.exact("host", execute)
            # What is fetched ahead is learnt in the first window, so the second counts.
            rows[f"{execute} {size}"] = lab.measured(
                partial(train.step, pair), warm=1, rounds=1, recorded=execute == "graph"
            )
            print("peak of", execute, size, rows[f"{execute} {size}"], flush=True)
            del train, pair
            lab.empty()
            note()


def write(found: dict[str, Any]) -> None:
    """The page and its figures; a page needs the rows that the others are compared with."""
    folder = Path(os.environ.get("OUT") or Path(__file__).parents[1] / "docs" / "benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "batchnorm.json").write_text(json.dumps(found, indent=1) + "\n")
    if len(found.get("ways", ())) >= 4:
        (folder / "batchnorm.md").write_text(page(found), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peaks", default="64,256,1024", help="batch sizes")
    parser.add_argument(
        "--parts", default="ways,peaks", help="of ways, plain, peaks, recorded-peaks"
    )
    parser.add_argument("--merge", nargs="*", type=Path, help="pages from files of parts")
    options = parser.parse_args()
    if options.merge:
        merged: dict[str, Any] = {}
        for part in options.merge:
            for name, value in json.loads(part.read_text()).items():
                merged[name] = {**merged.get(name, {}), **value}
        write(merged)
        return
    lab = Lab(options.device, options.batch, options.micro, options.side, options.rounds)
    found: dict[str, Any] = {
        "about": {
            "date": date.today().isoformat(),
            "machine": torch.cuda.get_device_name() if lab.on_cuda else "CPU",
            "torch": torch.__version__,
            "norms": len(batchnorms(lab.model)),
            "blocks": len(lab.blocks),
            "batch": lab.batch,
            "micro": lab.micro,
            "side": lab.side,
            "how": f"one update, the median of {lab.rounds} windows",
        }
    }

    def note() -> None:
        if lab.on_cuda:  # else it was only tried out
            write(found)

    if lab.on_cuda:
        found["link"] = link()
        print("link", found["link"], flush=True)
    parts = options.parts.split(",")
    if "ways" in parts or "plain" in parts:
        compare(lab, found, note, exact="ways" in parts)
    if "peaks" in parts or "recorded-peaks" in parts:
        sizes = [int(size) for size in options.peaks.split(",")]
        peaks(lab, found, sizes, note, threads="peaks" in parts)
    if "ways" in found:
        print(page(found))


if __name__ == "__main__":
    main()
