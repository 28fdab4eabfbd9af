"""What `wb.watch` adds to a window: recorded, and counted once it knows the loop.

python benchmarks/watch_rounds.py
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional as F

import wholebatch as wb


def cost() -> str:
    """Return what a watch adds to a window of 4 micro-batches of 12 layers of 256.

    Windows with and without it take turns, in processor time; the fastest of each counts.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    micros = [(torch.randn(64, 256), torch.randint(0, 10, (64,))) for _ in range(4)]

    def seconds() -> float:
        began = time.process_time()
        for x, y in micros:
            (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - began

    plain, recorded, counted = [], [], []
    for _ in range(8):
        plain += [seconds() for _ in range(12)]
        with wb.watch(model, optimizer):
            recorded += [seconds() for _ in range(8)]
            counted += [seconds() for _ in range(12)]
    alone, full, brief = (1e3 * min(row) for row in (plain, recorded, counted))
    return (
        f"a window takes {alone:.1f} ms, {full:.1f} ms recorded ({full / alone:.2f} times), and "
        f"{brief:.1f} ms counted ({100 * (brief / alone - 1):+.1f}%)"
    )


if __name__ == "__main__":
    print(cost())
