"""Exact BatchNorm on a GPU: a ResNet-50, 256 images in micro-batches of 16, held in every way.

Time and memory of one window beside those of the whole batch and of plain (wrong) micro-batching,
all in one run: `python benchmarks/gpu_batchnorm.py [batch] [micro-batch]`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.coupled import batchnorms
from wholebatch.runners.blocks import Recomputed, blocks_of
from wholebatch.runners.lockstep import Hold, LockStep

Pair = tuple[Tensor, Tensor]
Window = Callable[[], object]


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


def measured(window: Window, model: nn.Module, *, rounds: int) -> tuple[float, float]:
    """Milliseconds (median) and GiB (beyond the parameters) of a window."""
    times = []
    for _ in range(rounds + 2):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        window()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return statistics.median(times[2:]), peak


def link() -> tuple[float, float]:
    """GB/s of the host link, out and in."""
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    found = []
    for target, source in ((host, device), (device, host)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        found.append(8 * len(host) / (time.perf_counter() - start) / 1e9)
    return found[0], found[1]


def main() -> None:
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    micro = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    only = sys.argv[3].split(",") if len(sys.argv) > 3 else None
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = resnet50().cuda()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(size, 3, 224, 224).pin_memory()
    y = torch.randint(0, 1000, (size,)).pin_memory()
    micros = list(zip(x.split(micro), y.split(micro), strict=True))
    blocks = blocks_of(model)

    def moved(pair: Pair) -> Pair:
        image = pair[0].to("cuda", non_blocking=True, memory_format=torch.channels_last)
        return image, pair[1].to("cuda", non_blocking=True)

    def loss(pair: Pair) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.cross_entropy(model(pair[0]), pair[1], reduction="sum")

    def plain(parts: list[Pair], recomputed: bool) -> Window:
        def window() -> None:
            with Recomputed(blocks if recomputed else ()):
                for part in parts:
                    loss(moved(part)).backward()

        return window

    ways: dict[str, Window] = {
        "whole batch": plain([(x, y)], False),
        "whole batch, blocks again": plain([(x, y)], True),
        "plain micro-batches (wrong)": plain(micros, False),
        "plain micro-batches, blocks again (wrong)": plain(micros, True),
    }
    holds: tuple[Hold, ...] = ("graphs", "inputs", "host")
    steps = {hold: LockStep(batchnorms(model), model=model, hold=hold) for hold in holds}
    for hold, step in steps.items():
        ways[f'exact, hold="{hold}"'] = partial(
            step.run, micros, forward=loss, backward=Tensor.backward, moved=moved
        )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ResNet-50, {size} images in")
    print(f"micro-batches of {micro}, bf16 autocast, channels last; GiB beyond the parameters")
    print(f"{len(blocks)} blocks, {len(batchnorms(model))} BatchNorms")
    for name, window in ways.items():
        if only is not None and not any(part in name for part in only):
            continue
        try:
            milliseconds, gib = measured(window, model, rounds=3 if "host" in name else 5)
        except torch.cuda.OutOfMemoryError:
            print(f"{name:45} out of memory")
            continue
        print(f"{name:45} {milliseconds:9.1f} ms  {gib:7.3f} GiB", flush=True)
        if (paged := steps["host"].paged) is not None:
            out, back = link()
            moved_bytes = paged.bytes_out + paged.bytes_in
            print(
                f"    {paged.bytes_out / 1e9:.2f} GB out, {paged.bytes_in / 1e9:.2f} GB in: ",
                end="",
            )
            print(
                f"{moved_bytes / milliseconds / 1e6:.1f} GB/s of {out:.1f} out, {back:.1f} in alone"
            )


if __name__ == "__main__":
    main()
