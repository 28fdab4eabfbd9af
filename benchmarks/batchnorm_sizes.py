"""From which micro-batch size BatchNorm matters, and what its synchronisation costs.

    python benchmarks/batchnorm_sizes.py           # print both tables
    python benchmarks/batchnorm_sizes.py --page    # write them into docs/batchnorm.md

A ResNet of 14 layers learns scikit-learn's digits in batches of 64, three seeds. BatchNorm sees the
whole batch ("exact") or each micro-batch ("allow"); beside it the two norms that need no batch. The
second table is the same model on two ranks of this machine, over gloo.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.multiprocessing.spawn import spawn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import wholebatch as wb  # noqa: E402
from wholebatch.options import BatchNormPolicy  # noqa: E402

PAGE = ROOT / "docs" / "batchnorm.md"
BEGIN, END = "<!-- batchnorm_sizes -->", "<!-- end of batchnorm_sizes -->"
BATCH, EPOCHS, SEEDS = 64, 4, (0, 1, 2)
Norm = Callable[[int], nn.Module]
NORMS: dict[str, Norm] = {
    "GroupNorm": lambda channels: nn.GroupNorm(math.gcd(32, channels), channels),
    "LayerNorm": lambda channels: nn.GroupNorm(1, channels),
}


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([norm(outputs), norm(outputs)])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        result: Tensor = F.relu(self.norms[1](self.second(y)) + self.shortcut(x))
        return result


def resnet(norm: Norm = nn.BatchNorm2d) -> nn.Module:
    """Return the model: 6 blocks, 16 to 64 channels."""
    widths = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    blocks = [Block(*shape, norm) for shape in widths]
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), norm(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def loss(model: nn.Module, micro: tuple[Tensor, Tensor]) -> wb.Loss:
    """Return the cross-entropy of the images."""
    return wb.Loss(F.cross_entropy(model(micro[0]), micro[1], reduction="sum"), len(micro[1]))


@dataclass(frozen=True)
class Data:
    """Images and digits, to train and to test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def digits() -> Data:
    """Return scikit-learn's digits: 1,437 images to train, 360 to test."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return Data((images[360:], labels[360:]), (images[:360], labels[:360]))


def gradient(model: nn.Module, sizes: list[int], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean gradient of a batch, run in parts of these sizes."""
    model.zero_grad()
    for x, y in zip(batch[0].split(sizes), batch[1].split(sizes), strict=True):
        (F.cross_entropy(model(x), y, reduction="sum") / len(batch[1])).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def accuracy(model: nn.Module, data: Data) -> float:
    """Return the share of right answers in evaluation mode, in percent.

    The running statistics are taken anew, so that only the weights differ: with smaller
    micro-batches they would have moved more often.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the average of all batches
    with torch.no_grad():
        for images in data.train[0].split(BATCH)[:-1]:
            model(images)
        model.eval()
        right = (model(data.test[0]).argmax(1) == data.test[1]).float().mean().item()
    model.train()
    return 100 * float(right)


def train(data: Data, seed: int, *, micro: int, norm: Norm = nn.BatchNorm2d) -> float:
    """Train with BatchNorm as micro-batches of this size see it, and return the accuracy."""
    torch.manual_seed(seed)
    model = resnet(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    policy: BatchNormPolicy = "exact" if micro == BATCH else "allow"
    step = wb.WholeBatch(
        model, optimizer, loss=loss, micro_batch=micro, batchnorm=policy, execute="eager"
    ).step
    chance = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        order = torch.randperm(len(data.train[1]), generator=chance)
        for rows in order.split(BATCH)[:-1]:
            step((data.train[0][rows], data.train[1][rows]))
    return accuracy(model, data)


def spread(values: list[float]) -> str:
    """Return the mean and the range of some percentages."""
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def sizes_table() -> list[str]:
    """Return the first table."""
    data = digits()
    batch = (data.train[0][:BATCH].double(), data.train[1][:BATCH])
    torch.manual_seed(0)
    model = resnet().double()
    right = gradient(model, [BATCH], batch)
    lines = [
        "| BatchNorm sees | gradient off by | test accuracy, % (three seeds) |",
        "|---|---:|---:|",
    ]
    for micro in (BATCH, 32, 16, 8, 4, 2):
        off = (gradient(model, [micro] * (BATCH // micro), batch) - right).norm() / right.norm()
        reached = spread([train(data, seed, micro=micro) for seed in SEEDS])
        name = f"the batch of {BATCH}" if micro == BATCH else f"micro-batches of {micro}"
        lines.append(f"| {name} | {off:.0%} | {reached} |")
        print(lines[-1], flush=True)
    for name, norm in NORMS.items():
        reached = spread([train(data, seed, micro=8, norm=norm) for seed in SEEDS])
        lines.append(f"| {name} instead, micro-batches of 8 | 0% | {reached} |")
        print(lines[-1], flush=True)
    return lines


def rank_times(rank: int, folder: str) -> None:
    """Time windows on one of two ranks, and write the medians."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    medians = []
    policies: tuple[BatchNormPolicy, ...] = ("exact", "freeze")
    for policy in policies:
        torch.manual_seed(0)
        model = resnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train = wb.WholeBatch(
            model, optimizer, loss=loss, micro_batch=BATCH, batchnorm=policy, execute="eager"
        )
        batch = (torch.rand(BATCH, 1, 8, 8), torch.randint(0, 10, (BATCH,)))
        times = []
        for _ in range(30):
            began = time.perf_counter()
            train.step(batch)
            times.append(time.perf_counter() - began)
        medians.append(1000 * statistics.median(times[10:]))
    if rank == 0:
        (Path(folder) / "times").write_text(" ".join(map(str, medians)), encoding="utf-8")
    dist.destroy_process_group()


def ranks_table() -> list[str]:
    """Return the second table: what synchronised statistics cost."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_times, args=(folder,), nprocs=2)
        exact, freeze = map(float, (Path(folder) / "times").read_text().split())
    model = resnet()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    channels = sum(module.num_features for module in norms)
    # Forward: sums and squares of each channel, in two all-reduces. Backward: two sums in one.
    kib = 4 * channels * 4 / 1024
    gradients = 4 * sum(p.numel() for p in model.parameters()) / 1024
    return [
        "| two ranks, gloo, one machine | ms a window | KiB all-reduced |",
        "|---|---:|---:|",
        f"| statistics of all ranks, {len(norms)} BatchNorms with {channels} channels "
        f"| {exact:.0f} | {kib:.0f} for statistics, {gradients:.0f} for gradients |",
        f'| running statistics (`"freeze"`) | {freeze:.0f} | {gradients:.0f} for gradients |',
    ]


def main() -> int:
    """Print the tables, and write them into the page with --page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--page", action="store_true", help=f"write the tables into {PAGE.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tables = ["", *sizes_table(), "", *ranks_table(), ""]
    print("\n".join(tables))
    if arguments.page:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(before + BEGIN + "\n".join(tables) + "\n" + END + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
