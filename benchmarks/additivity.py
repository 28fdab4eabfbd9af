"""Measure what the tests that a loss adds up cost in a run of 1,000 windows.

    python benchmarks/additivity.py [--cuda]

Windows 1, 2, 4, ..., 512 are tested: the first on 8 samples, the others on a whole micro-batch.
Each test is timed by itself, beside a window of `WholeBatch` without tests: 8 micro-batches of
eager code and an update by AdamW.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.audit.adds_up import SAMPLES, check_adds_up
from wholebatch.audit.finding import refuse
from wholebatch.batch.samples import layout_of
from wholebatch.window.window import is_tested_window

ROUNDS = 5
WINDOWS, MICRO_BATCHES = 1000, 8


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        made: Tensor = x + self.mlp(self.norms[1](x))
        return made


def transformer(
    width: int, depth: int, length: int, samples: int, dropout: float = 0.0
) -> tuple[nn.Module, Any]:
    blocks = [Block(width, dropout) for _ in range(depth)]
    model = nn.Sequential(nn.Embedding(1000, width), *blocks, nn.Linear(width, 1000))
    return model, torch.randint(0, 1000, (samples, length))


def cnn(channels: int, size: int, samples: int) -> tuple[nn.Module, Any]:
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(6):
        layers += [
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return nn.Sequential(*layers, *head), torch.randn(samples, 3, size, size)


def mlp(width: int, samples: int) -> tuple[nn.Module, Any]:
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    return model, torch.randn(samples, width)


ON_CPU: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "transformer 4×256, 128 tokens, micro-batch 16": lambda: transformer(256, 4, 128, 16),
    "the same with dropout": lambda: transformer(256, 4, 128, 16, 0.1),
    "transformer 4×256, 128 tokens, micro-batch 4": lambda: transformer(256, 4, 128, 4),
    "CNN 7×64, 32×32 images, micro-batch 16": lambda: cnn(64, 32, 16),
    "MLP 2×1024, micro-batch 64": lambda: mlp(1024, 64),
    "MLP 2×64, micro-batch 8": lambda: mlp(64, 8),
}
ON_CUDA: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "transformer 12×768, 1024 tokens, micro-batch 16": lambda: transformer(768, 12, 1024, 16),
    "the same with dropout": lambda: transformer(768, 12, 1024, 16, 0.1),
    "transformer 12×768, 1024 tokens, micro-batch 4": lambda: transformer(768, 12, 1024, 4),
    "CNN 7×256, 128×128 images, micro-batch 32": lambda: cnn(256, 128, 32),
    "MLP 2×64, micro-batch 8": lambda: mlp(64, 8),
}


def loss(model: nn.Module, micro: Tensor) -> wb.Loss:
    if micro.is_floating_point():
        total = model(micro).square().mean(1).sum()
        return wb.Loss(total, len(micro))
    return wb.cross_entropy(model(micro[:, :-1]), micro[:, 1:])


def seconds(run: Callable[[], Any], device: str) -> float:
    """Return the median time of one call; processor time on a CPU, where others may run."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    times = []
    for _ in range(ROUNDS + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        began = clock()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - began)
    return statistics.median(times[1:])


def measured(name: str, make: Callable[[], tuple[nn.Module, Any]], device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, micro = make()
    model, micro = model.to(device), micro.to(device)

    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"execute": "eager", "audit": False}
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=len(micro), **options)
    batch = torch.cat([micro] * MICRO_BATCHES)

    def test(count: int) -> None:
        run = partial(loss, model)
        refuse(check_adds_up(model, run, layout_of(micro), count=count).findings)

    step = seconds(partial(train.step, batch), device)
    first, later = (seconds(partial(test, count), device) for count in (SAMPLES, len(micro)))
    tests = first + later * sum(map(is_tested_window, range(2, WINDOWS + 1)))
    return {
        "case": name,
        "window_ms": step * 1e3,
        "first_ms": first * 1e3,
        "later_ms": later * 1e3,
        "share": tests / (step * WINDOWS),
    }


def table(rows: list[dict[str, Any]], where: str) -> str:
    lines = [
        "# The cost of testing that the loss adds up\n",
        f"`python benchmarks/additivity.py`, {date.today()}, {where}, torch {torch.__version__}. "
        f"Windows: {MICRO_BATCHES} micro-batches of eager code and an update by AdamW. Medians of "
        f"{ROUNDS}. All tests: of {WINDOWS:,} windows.\n",
        "| model | one window, ms | first test, ms | a later test, ms | all tests |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['case']} | {row['window_ms']:.1f} | {row['first_ms']:.1f} | {row['later_ms']:.1f} "
        f"| {row['share']:.2%} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cuda", action="store_true", help="measure on the CUDA device")
    options = parser.parse_args()
    device = "cuda" if options.cuda else "cpu"
    where = (
        torch.cuda.get_device_name()
        if options.cuda
        else f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    )
    rows = []
    for name, make in (ON_CUDA if options.cuda else ON_CPU).items():
        rows.append(measured(name, make, device))
        print(f"{name}: all tests {rows[-1]['share']:.2%}", flush=True)
    print(table(rows, where))


if __name__ == "__main__":
    main()
