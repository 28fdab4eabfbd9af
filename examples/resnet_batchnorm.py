"""A ResNet with BatchNorm: the update of 64 images in less memory.

    python examples/resnet_batchnorm.py

Four ways to train from the same start: the undivided batch; plain accumulation (the usual loop),
whose BatchNorms see 8 images at a time; and `wb.WholeBatch`, which does not split the batch of a
model with BatchNorm, once as it is and once with checkpointed blocks: they keep their inputs and
are computed again in the backward, as WholeBatch does by itself when memory runs out. Printed are
the distance of each from the undivided batch and the memory that a step took.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.memory import MemoryMeter, with_checkpoints

Batch = dict[str, Tensor]
Step = Callable[[Batch], object]


class Residual(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short = nn.Conv2d(inside, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


def resnet(classes: int = 4, depth: int = 1) -> nn.Module:
    """Return a ResNet of three stages, each of `depth` blocks."""
    torch.manual_seed(0)
    sizes = ((16, 16, 1), (16, 32, 2), (32, 64, 2))
    stages = [
        [Residual(inside, out, stride), *(Residual(out, out, 1) for _ in range(depth - 1))]
        for inside, out, stride in sizes
    ]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(block for stage in stages for block in stage),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    ).double()


def images(number: int, seed: int, classes: int = 4) -> Batch:
    """Noise, brighter in the quarter that is the label."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 3, 16, 16, generator=draw, dtype=torch.float64)
    y = torch.randint(0, classes, (number,), generator=draw)
    for image, label in zip(x, y.tolist(), strict=True):
        row, column = 8 * (label // 2), 8 * (label % 2)
        image[:, row : row + 8, column : column + 8] += 0.5
    return {"x": x, "y": y}


def loss(model: nn.Module, micro: Batch) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def undivided(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> None:
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch: int) -> Step:
    """The loop that everyone writes; its loss is right, its BatchNorms are not."""

    def step(batch: Batch) -> None:
        for micro in wb.split(batch, micro_batch):
            total = F.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")
            (total / len(batch["y"])).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def exact(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch: int) -> Step:
    return wb.WholeBatch(model, optimizer, loss=loss).step


def frugal(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch: int) -> Step:
    with_checkpoints(model)
    return wb.WholeBatch(model, optimizer, loss=loss).step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def distance(a: list[Tensor], b: list[Tensor], start: list[Tensor]) -> float:
    """Of two ways from the same start, relative to the second."""
    above = sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True))
    below = sum(float((y - z).square().sum()) for y, z in zip(b, start, strict=True))
    return float((above / below) ** 0.5)


def state(model: nn.Module, *, statistics: bool) -> list[Tensor]:
    chosen = [b for b in model.buffers() if b.is_floating_point()] if statistics else []
    return [t.detach().clone() for t in (chosen or model.parameters())]


def main(updates: int = 2, batch: int = 64, micro_batch: int = 8) -> dict[str, tuple[float, ...]]:
    start = resnet(depth=3)
    rows: dict[str, tuple[float, ...]] = {}
    reference: nn.Module = start
    ways = {"plain accumulation": plain, "wholebatch": exact, "wholebatch, checkpointed": frugal}
    for name in ("undivided", *ways):
        model = copy.deepcopy(start)
        optimizer = sgd(model)
        step = (
            undivided(model, optimizer)
            if name == "undivided"
            else ways[name](model, optimizer, micro_batch)
        )
        for number in range(updates - 1):
            step(images(batch, number))
        with MemoryMeter(model=model, optimizer=optimizer) as meter:
            step(images(batch, updates - 1))
        if name == "undivided":
            reference = model
        far = [
            distance(
                state(model, statistics=which),
                state(reference, statistics=which),
                state(start, statistics=which),
            )
            for which in (False, True)
        ]
        rows[name] = (*far, meter.peak / 2**20)
        print(
            f"{name:25} weights {far[0]:8.1e}  running statistics {far[1]:8.1e}  "
            f"peak {meter.peak / 2**20:5.1f} MiB"
        )
    usual, ours = rows["plain accumulation"], rows["wholebatch, checkpointed"]
    print(
        f"Shown: the update is off by {usual[0]:.0%} in the usual loop, by {ours[0]:.0e} with "
        f"wb.WholeBatch, which takes {ours[2]:.1f} MiB; the undivided batch takes "
        f"{rows['undivided'][2]:.1f} MiB."
    )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=2)
    main(parser.parse_args().updates)
