"""Ranks on one CUDA device: nccl with one rank, and two processes that share the device by gloo.

nccl takes a device only once, so what needs two ranks (SyncBatchNorm, sums over ranks) runs over
gloo, with the tensors on the device. Without CUDA everything runs on the CPU, to try the file out.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.support import grouped

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
Micro = dict[str, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    ).to(DEVICE, torch.float64)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(108, 32), nn.Tanh(), nn.Linear(32, 5)]
    return nn.Sequential(*layers).to(DEVICE, torch.float64)


def batch(size: int, seed: int = 0) -> Micro:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 6, 6, generator=generator, dtype=torch.float64)
    x = x * torch.linspace(0.3, 2, size, dtype=torch.float64).view(-1, 1, 1, 1) + 1
    return {"x": x, "y": torch.randint(0, 5, (size,), generator=generator)}


def loss(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def reference(model: nn.Module, groups: list[list[Micro]]) -> list[Tensor]:
    """Parameters and running statistics after plain SGD; one group of parts for each update."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in groups:
        units = sum(len(part["y"]) for part in parts)
        for part in parts:
            out = model(part["x"].to(DEVICE))
            (F.cross_entropy(out, part["y"].to(DEVICE), reduction="sum") / units).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tensors(model)


def tensors(model: nn.Module) -> list[Tensor]:
    found = [*model.parameters(), *model.buffers()]
    return [t.detach().cpu() for t in found if t.is_floating_point()]


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    a, b = (torch.cat([t.flatten() for t in each]) for each in (ours, theirs))
    return float((a - b).norm() / b.norm())


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of one rank, of the backend that trains on this device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the set-up only
        device = torch.device("cuda", 0) if DEVICE == "cuda" else None
        dist.init_process_group(
            BACKEND, store=dist.HashStore(), rank=0, world_size=1, device_id=device
        )
    try:
        yield
    finally:
        dist.destroy_process_group()


def wrapped(model: nn.Module) -> DistributedDataParallel:
    ids = [0] if DEVICE == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


def trained(model: nn.Module, sizes: list[int], **options: Any) -> wb.WholeBatch:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = wb.WholeBatch(model, optimizer, loss=loss, **grouped(options))
    for seed, size in enumerate(sizes):
        train.step(batch(size, seed))
    return train


def test_exact_batchnorm_under_ddp_with_one_rank() -> None:
    with one_rank():
        model = network()
        want = reference(model, [[batch(11, seed)] for seed in range(5)])
        trained(wrapped(model), [11] * 5, micro_batch=4)
        assert distance(tensors(model), want) <= 1e-12


def sharded_distance(sync: str) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = plain()
    want = reference(model, [[batch(11, 0)], [batch(7, 1)]])
    mesh = init_device_mesh(DEVICE, (1,))
    for layer in (model[1], model[3], model):
        fully_shard(layer, mesh=mesh)
    train = trained(model, [11, 7], micro_batch=3, clip_norm=1e6, sync=sync)
    assert train.last_step is not None
    assert train.last_step.units == 7
    ours = [p.full_tensor().detach().cpu() for p in model.parameters()]  # type: ignore[attr-defined]
    return distance(ours, want)


def test_fsdp2_with_one_rank() -> None:
    with one_rank():
        for sync in ("hold", "every", "auto"):
            assert sharded_distance(sync) <= 1e-12, sync


# ---------------------------------------------------------------------- two processes, one device


def exact(rank: int) -> float:
    """Uneven shares of a global batch of 13, in micro-batches, against the undivided one."""
    model = network()
    wholes = [batch(13, seed) for seed in range(2)]
    want = reference(model, [[whole] for whole in wholes])
    train = wb.WholeBatch(
        ddp := wrapped(model), torch.optim.SGD(ddp.parameters(), lr=0.1), loss=loss, micro_batch=3
    )
    for whole in wholes:
        share = slice(0, 6) if rank == 0 else slice(6, 13)
        train.step({name: leaf[share] for name, leaf in whole.items()})
    return distance(tensors(model), want)


JOBS: dict[str, Callable[[int], float]] = {"exact": exact}


def by_two_processes(job: str) -> list[float]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        command = [sys.executable, str(Path(__file__).resolve()), job, str(store)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        said = [process.communicate(timeout=120)[0] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), said
    return [float(text.strip().splitlines()[-1]) for text in said]


def test_exact_batchnorm_of_two_processes_on_one_device() -> None:
    found = by_two_processes("exact")
    assert max(found) <= 1e-12, found


if __name__ == "__main__":
    place = int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=place, world_size=2)
    measured = JOBS[sys.argv[1]](place)
    dist.barrier()
    dist.destroy_process_group()
    print(measured)
