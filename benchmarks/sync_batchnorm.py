"""Time of BatchNorm's ways over two ranks: plain, SyncBatchNorm, and exact over the whole window.

    PYTHONPATH=src python benchmarks/sync_batchnorm.py [--windows 10]

Two processes share one device and talk over gloo: nccl takes a device only once. So the times are
those of this machine's memory, not of a network; the number of collectives is the same on any.
Without CUDA, SyncBatchNorm is left out (torch runs it on GPUs only).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, WIDTH, BATCH, MICRO, SIDE = 16, 64, 32, 8, 32 if DEVICE == "cuda" else 8
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, WIDTH, 3, padding=1)]
    for _ in range(LAYERS):
        layers += [nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(WIDTH * SIDE * SIDE, 5)).to(DEVICE)


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def measured(policy: Any, windows: int) -> tuple[float, float]:
    """Return the median seconds of a window, and its collectives."""
    count = 0
    found = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return call(*args, **kwargs)

        return counted

    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train = wb.WholeBatch(
        model, optimizer, loss=loss, micro_batch=MICRO, batchnorm=policy, audit=False
    )
    x = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE)
    data = {"x": x, "y": torch.randint(0, 5, (BATCH,), device=DEVICE)}
    for _ in range(2):
        train.step(data)
    times = []
    for name, call in found.items():
        setattr(dist, name, counting(call))
    for _ in range(windows):
        dist.barrier()
        began = time.perf_counter()
        train.step(data)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    for name, call in found.items():
        setattr(dist, name, call)
    return statistics.median(times), count / windows


def work(rank: int, store: str, windows: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ways = ["statistics", *(["sync"] if DEVICE == "cuda" else []), "exact"]
    rows = [(way, *measured(way, windows)) for way in ways]
    if rank == 0:
        about = f"{LAYERS} BatchNorms, {BATCH // MICRO} micro-batches of {MICRO}, 2 ranks, gloo"
        print(f"{about}, {DEVICE}, torch {torch.__version__}\n")
        print("| batchnorm | ms per window | beside `statistics` | collectives |")
        print("|---|---:|---:|---:|")
        for way, seconds, collectives in rows:
            print(
                f"| `{way}` | {1000 * seconds:.1f} | × {seconds / rows[0][1]:.2f} "
                f"| {collectives:.0f} |"
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (f"{folder}/store", given.windows), nprocs=2)


if __name__ == "__main__":
    main()
