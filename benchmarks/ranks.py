"""Windows on several ranks: DDP, ZeRO-1 and FSDP2 in its three ways, beside plain loops.

    torchrun --standalone --nproc-per-node 8 benchmarks/ranks.py --out ranks.json
    torchrun --standalone --nproc-per-node 2 benchmarks/ranks.py --tiny --out ranks.json  # any CPU

Processes share a GPU by gloo where there are fewer GPUs than processes; such times say nothing. One
process also trains unsharded, to compare with.

Every way first makes two updates of a small Llama in float64, with other masks and other numbers of
samples on each rank. They are compared with those of one process on the global batch, as a relative
L2 distance. Then it trains the Llama of the given size. The time of a window is the median, on the
slowest rank. One JSON file is written, and one row for docs/benchmarks/ranks.md is printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.distributed.process_group import all_meet

WAYS = ("unsharded", "DDP", "ZeRO-1", "gathered", "hold", "every", "plain DDP", "plain FSDP2")
HEADER = (
    "date",
    "hardware",
    "model",
    "window",
    *WAYS,
    "furthest update",
    "versions",
)
IGNORED = -100
GIB = 2**30


# ------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Size:
    """The size of a Llama."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int


SMALL = Size(layers=2, width=32, heads=2, vocabulary=64, tokens=12)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, width, inner = size.heads, size.width, size.width * 8 // 3
        self.first_norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_and_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.first_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = (one.transpose(1, 2) for one in qkv.unbind(2))
        q, k = _rotated(q, rotation), _rotated(k, rotation)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_and_up(self.second_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(functional.silu(gate) * up)
        return out


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    cos, sin = rotation.to(x.dtype)
    half = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], dim=-1)
    rotated: Tensor = x * cos + half * sin
    return rotated


class Llama(nn.Module):
    rotation: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        head = size.width // size.heads
        rates = 10_000.0 ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
        angles = torch.outer(torch.arange(size.tokens, dtype=torch.float64), rates).repeat(1, 2)
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits


def made(size: Size, device: torch.device, dtype: torch.dtype) -> Llama:
    torch.manual_seed(0)
    with device:
        return Llama(size).to(dtype)


Batch = dict[str, Tensor]


def data(size: Size, samples: int, seed: int, device: torch.device) -> Batch:
    """Return random tokens, a part of whose labels is ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(size.vocabulary, (samples, size.tokens + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    kept = torch.randint(1, size.tokens + 1, (samples, 1), generator=generator)
    labels[torch.arange(size.tokens) >= kept] = IGNORED
    return {"x": tokens[:, :-1].contiguous().to(device), "y": labels.to(device)}


def loss(model: nn.Module, micro: Batch) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"], ignore_index=IGNORED)


# ------------------------------------------------------------------------------ the ways


@dataclass(frozen=True)
class Run:
    """A model that trains in one way: `step(batch)` makes one update."""

    model: nn.Module
    step: Callable[[Batch], object]


def run(
    way: str,
    model: Llama,
    make: Callable[..., torch.optim.Optimizer],
    *,
    micro_batch: int,
    bf16: bool,
    execute: Literal["auto", "eager", "graph"],
) -> Run:
    """Wrap the model and its optimizer for one way of training on all ranks."""
    device = next(model.parameters()).device
    if way == "unsharded":
        wrapped: nn.Module = model
    elif "DDP" in way or way == "ZeRO-1":
        wrapped = DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None
        )
    else:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        wrapped = model
    if way == "ZeRO-1":
        of_groups: Any = lambda groups, **_: make(groups)  # noqa: E731
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=of_groups
        )
    else:
        optimizer = make(wrapped.parameters())
    if way.startswith("plain"):
        return Run(wrapped, lambda batch: _plain_step(wrapped, optimizer, batch, micro_batch, bf16))
    sharded = way in ("gathered", "hold", "every")
    train = wb.WholeBatch(
        wrapped,
        optimizer,
        loss=loss,
        micro_batch=micro_batch,
        precision="bf16" if bf16 else "full",
        execute="auto" if way in ("hold", "every") else execute,
        close=wb.Close(sync=way) if sharded else None,  # type: ignore[arg-type]
    )
    return Run(wrapped, train.step)


def _plain_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: Batch, micro_batch: int, bf16: bool
) -> None:
    """Accumulate as the manuals of DDP and FSDP2 do, divided by the tokens of this rank.

    It is what the times are compared with; its update is right only if every rank has as many
    tokens.
    """
    parts = [
        dict(zip(batch, pair, strict=True))
        for pair in zip(*(tensor.split(micro_batch) for tensor in batch.values()), strict=True)
    ]
    count = (batch["y"] != IGNORED).sum()
    for place, micro in enumerate(parts):
        last = place == len(parts) - 1
        if isinstance(model, DistributedDataParallel):
            held = nullcontext() if last else model.no_sync()
        else:
            model.set_requires_gradient_sync(last)
            held = nullcontext()
        with held, torch.autocast(batch["x"].device.type, torch.bfloat16, enabled=bf16):
            total = loss(model, micro).total
            (total / count).backward()
    optimizer.step()
    optimizer.zero_grad()


# ------------------------------------------------------------------------------ exactness


def whole(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]


def furthest(way: str, device: torch.device) -> float | None:
    """Return the relative L2 distance of two updates from one process on the global batch."""
    if way.startswith("plain"):
        return None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    samples = [3 + 2 * (place % 2) for place in range(ranks)]  # and other numbers of micro-batches

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    model = made(SMALL, device, torch.float64)
    start = whole(model)
    trained = run(way, model, sgd, micro_batch=2, bf16=False, execute="auto")
    alone = made(SMALL, device, torch.float64)
    optimizer = sgd(alone.parameters())
    for window in range(2):
        every = [data(SMALL, n, 100 * window + r, device) for r, n in enumerate(samples)]
        trained.step(every[rank])
        joined = {name: torch.cat([one[name] for one in every]) for name in every[0]}
        logits = alone(joined["x"]).flatten(0, 1)
        functional.cross_entropy(logits, joined["y"].flatten(), ignore_index=IGNORED).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = torch.cat([(a - b).flatten() for a, b in zip(whole(model), start, strict=True)])
    right = torch.cat([(a - b).flatten() for a, b in zip(whole(alone), start, strict=True)])
    distance = torch.linalg.vector_norm(moved - right) / torch.linalg.vector_norm(right)
    dist.all_reduce(distance, op=dist.ReduceOp.MAX)
    return float(distance)


# ------------------------------------------------------------------------------ times


def timed(way: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the median time of a window on the slowest rank, and the most memory of a rank."""
    size = size_of(options)
    cuda = device.type == "cuda"

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=cuda)

    trained = run(
        way,
        made(size, device, torch.float32),
        adamw,
        micro_batch=options.micro_batch,
        bf16=options.precision == "bf16",
        execute="graph" if cuda else "auto",
    )
    batch = data(size, options.batch, dist.get_rank(), device)
    seconds: list[float] = []
    for window in range(options.warmup + options.windows):
        if window == options.warmup and cuda:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        began = time.perf_counter()
        trained.step(batch)
        if cuda:
            torch.cuda.synchronize()
        if window >= options.warmup:
            seconds.append(time.perf_counter() - began)
    most = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    found = torch.tensor([statistics.median(seconds), most], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {"ms": 1e3 * float(found[0]), "gib": float(found[1]) if cuda else None}


def size_of(options: argparse.Namespace) -> Size:
    return Size(options.layers, options.width, options.heads, options.vocabulary, options.tokens)


# ------------------------------------------------------------------------------ the report


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def described(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return what a reader must know of the machines, the versions and the sizes."""
    cuda = device.type == "cuda"
    machines = dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
        "ranks": dist.get_world_size(),
        "machines": machines,
        "backend": dist.get_backend(),
        "versions": {
            "wholebatch": wb.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "commit": commit(),
        "size": asdict(size_of(options)),
        "parameters": sum(
            p.numel()
            for p in made(size_of(options), torch.device("meta"), torch.float32).parameters()
        ),
        "batch": options.batch,
        "micro_batch": options.micro_batch,
        "precision": options.precision,
        "windows": options.windows,
    }


def row_of(report: dict[str, Any]) -> str:
    """Return the report as a row of the table in docs/benchmarks/ranks.md."""
    size, versions = report["size"], report["versions"]
    ways = []
    for way in WAYS:
        found = report["ways"].get(way)
        if found is None or "error" in found:
            ways.append("–" if found is None else "failed")
            continue
        memory = "" if found["gib"] is None else f" ({found['gib']:.1f})"
        ways.append(f"{found['ms']:.4g}{memory}")
    far = [one["update"] for one in report["ways"].values() if one.get("update") is not None]
    model = f"Llama {size['layers']}×{size['width']} ({report['parameters'] / 1e6:.3g} M)"
    steps = -(-report["batch"] // report["micro_batch"])
    window = (
        f"{report['batch']} × {size['tokens']} tokens a rank, {steps} micro-batches, "
        f"{report['precision']}"
    )
    where = f"{report['ranks']} × {report['hardware']}, {report['backend']}"
    where += f", {report['machines']} machines" if report["machines"] > 1 else ""
    made_by = f"torch {versions['torch']}, {report['commit']}"
    update = f"{max(far):.1e}" if far else "–"
    cells = [report["date"], where, model, window, *ways, update, made_by]
    return f"| {' | '.join(cells)} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (
        ("layers", 12),
        ("width", 768),
        ("heads", 12),
        ("vocabulary", 32_000),
        ("tokens", 1024),
        ("batch", 32),
        ("micro-batch", 4),
        ("windows", 10),
        ("warmup", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", choices=("bf16", "full"), default="bf16")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of: " + ", ".join(WAYS))
    parser.add_argument("--tiny", action="store_true", help="a size for a CPU")
    parser.add_argument("--out", type=Path, default=Path("ranks.json"))
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.width, options.heads, options.vocabulary = 4, 128, 4, 512
        options.tokens, options.batch, options.micro_batch, options.precision = 64, 16, 2, "full"
        options.windows, options.warmup = 5, 2
    unknown = set(options.ways.split(",")) - set(WAYS)
    if unknown:
        parser.error(f"--ways {', '.join(sorted(unknown))}: must be some of {', '.join(WAYS)}")
    return options


def main() -> None:
    options = arguments()
    warnings.filterwarnings("ignore", category=UserWarning)
    cuda = torch.cuda.is_available()
    device, backend = torch.device("cpu"), "gloo"
    if cuda:
        place, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        device = torch.device("cuda", place % gpus)
        torch.cuda.set_device(device)
        backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=3))
    report = {**described(options, device), "ways": {}}
    for way in options.ways.split(","):
        if way == "unsharded" and dist.get_world_size() > 1:
            continue
        try:
            distance = furthest(way, device)
            gc.collect()
            report["ways"][way] = {"update": distance, **timed(way, options, device)}
        except Exception as problem:  # the other ways are still measured
            report["ways"][way] = {"error": f"{type(problem).__name__}: {str(problem)[:200]}"}
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(way, report["ways"][way], flush=True)
            options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if not all_meet(way, 60.0):  # a rank waits in a collective for one that has failed
            break
    if dist.get_rank() == 0:
        print(f"\n| {' | '.join(HEADER)} |\n{row_of(report)}")
        print(f"\nwritten to {options.out}; docs/benchmarks/ranks.md says how to send it")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
