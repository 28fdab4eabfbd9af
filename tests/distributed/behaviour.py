"""Bytes on the wire, agreement between ranks, and what is refused on several of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from tests.distributed.problem import loss, micro, outcome, wrapped
from tests.support import adamw, distance, grouped, mlp, samples, sgd


class Counted(TorchDispatchMode):
    """Bytes that this rank gives to reductions, as the dispatcher sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"gradients": 0, "small": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "reduce" in func.__name__:
            tensors = args[1] if "scatter" in func.__name__ else args[0]
            flat = tensors if isinstance(tensors, list | tuple) else [tensors]
            size = sum(t.numel() * t.element_size() for t in flat if isinstance(t, Tensor))
            self.bytes["gradients" if size > 512 else "small"] += size
        return func(*args, **(kwargs or {}))


def bytes_per_window(engine: str, micro_batches: int) -> dict[str, int]:
    model = wrapped(engine)
    acc = wb.Accumulator(model, sgd(model), steps=micro_batches)
    rank = dist.get_rank()
    micros = [micro(100 * rank + i, 2) for i in range(micro_batches)]
    for m in acc.over(micros):  # the first window warms up
        acc.backward(loss(model, m))
    with Counted() as sent:
        for m in acc.over(micros):
            acc.backward(loss(model, m))
    return sent.bytes


def fp16_skips_together() -> dict[str, Any]:
    """Only rank 1 overflows: no rank updates, and all scalers back off."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    acc = wb.Accumulator(model, sgd(model), steps=2, close=wb.Close(scaler=scaler))
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.ones(2, 4) * (1e36 if dist.get_rank() == 1 else 1.0)
    for micro_x in acc.over([x, x]):
        step = acc.backward(model(micro_x).sum(), units=2)
    assert step is not None
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    return {"skipped": step.skipped, "scale": scaler.get_scale(), "untouched": same}


def nonfinite_raises_everywhere() -> str:
    model = DistributedDataParallel(nn.Linear(4, 1))
    acc = wb.Accumulator(model, sgd(model), steps=2)
    x = torch.ones(2, 4) * (float("nan") if dist.get_rank() == 1 else 1.0)

    def loop() -> None:
        for micro_x in acc.over([torch.ones(2, 4), x]):
            acc.backward(model(micro_x).sum(), units=2)

    return outcome(loop)


def running_means() -> dict[str, list[float]]:
    """The running means of a BatchNorm after a window, with one micro-batch less on rank 1."""
    rank, means = dist.get_rank(), {}
    rows = [torch.full((3, 2), 1.0 + rank) + torch.arange(3.0).unsqueeze(1)] * (2 - rank)
    for engine in ("ddp", "fsdp2"):
        norm = nn.BatchNorm1d(2, affine=False)
        inner = nn.Sequential(norm, nn.Linear(2, 1))
        model = DistributedDataParallel(inner) if engine == "ddp" else fully_shard(inner)
        acc = wb.Accumulator(model, sgd(model), steps=2, batchnorm="allow")
        for x in acc.over(rows):
            acc.backward(model(x).square().sum(), units=3)
        assert norm.running_mean is not None
        means[engine] = norm.running_mean.tolist()
    return means


def with_a_metric(model: Any, batch: Any) -> wb.Loss:
    """A plain loss that gathers a metric, as TRL's SFTTrainer does; some samples have no units."""
    losses = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    total = (losses * batch["kept"]).sum()
    dist.all_reduce(total.detach().clone())
    return wb.Loss(total, batch["kept"].sum())


def tested_on_different_samples() -> float:
    """How far three updates are from those of the undivided batch.

    Rank 0 learns nothing from its test, so that all ranks test window 3, too.
    """
    rank, batch = dist.get_rank(), samples(20)
    batch["kept"] = torch.ones(20, dtype=torch.float64)
    batch["kept"][:8] = 0.0  # all that rank 0 tests
    own = {name: leaf[rank * 10 : rank * 10 + 10] for name, leaf in batch.items()}
    model, other = mlp(), mlp()
    wrapped = DistributedDataParallel(model)
    train = wb.WholeBatch(wrapped, sgd(model), loss=with_a_metric, micro_batch=4)
    optimizer = sgd(other)
    for _ in range(3):
        train.step(own)
        losses = functional.cross_entropy(other(batch["x"]), batch["y"], reduction="none")
        ((losses * batch["kept"]).sum() / batch["kept"].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return distance(model.parameters(), other.parameters())


def compares(model: Any, batch: Any) -> wb.Loss:
    """Compares the samples of all ranks, with gradients through the gather."""
    z = functional.normalize(model(batch["x"]), dim=1)
    everyone = torch.cat(dist.nn.functional.all_gather(z))
    targets = torch.arange(len(z)) + dist.get_rank() * len(z)
    return wb.Loss(functional.cross_entropy(z @ everyone.T, targets, reduction="sum"), len(z))


def refused() -> dict[str, str]:
    hooked, plain, coupled = (DistributedDataParallel(nn.Linear(4, 1)) for _ in range(3))
    hooked.register_comm_hook(None, lambda state, bucket: bucket.get_future())  # type: ignore[attr-defined]
    models: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "hook": (hooked, {}),
        "static": (DistributedDataParallel(nn.Linear(4, 1), static_graph=True), {}),
        "sparse": (DistributedDataParallel(nn.Embedding(4, 2, sparse=True)), {}),
        "every": (plain, {"sync": "every"}),
        "unknown": (plain, {"sync": "sometimes"}),
        "inside": (nn.Sequential(plain), {}),
        "narrow": (fully_shard(nn.Linear(4, 1).bfloat16()), {}),
        "plain": (plain.module, {}),
        "reduces": (plain, {"sync": "none"}),
        "by itself": (plain.module, {"sync": "none"}),
    }
    told = {
        name: outcome(partial(wb.Accumulator, model, sgd(model), steps=2, **grouped(options)))
        for name, (model, options) in models.items()
    }
    sharded = wrapped("fsdp2")
    acc = wb.Accumulator(sharded, adamw(sharded), steps=4)
    acc.backward(loss(sharded, micro(1, 2)))
    told |= {"state": outcome(acc.state_dict), "flush": outcome(acc.flush)}
    coupled = DistributedDataParallel(mlp())
    train = wb.WholeBatch(coupled, sgd(coupled), loss=compares, micro_batch=4)
    return {**told, "compares": outcome(lambda: train.step(samples(16)))}


def report() -> dict[str, Any]:
    return {
        "bytes": {
            engine: [bytes_per_window(engine, number) for number in (1, 5)]
            for engine in ("ddp", "fsdp2")
        },
        "fp16": fp16_skips_together(),
        "nonfinite": nonfinite_raises_everywhere(),
        "running means": running_means(),
        "off": tested_on_different_samples(),
        "refused": refused(),
    }
