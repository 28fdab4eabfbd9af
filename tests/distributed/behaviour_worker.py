"""Run under torchrun: bytes on the wire, agreement, and what is refused on several ranks."""

from __future__ import annotations

import copy
import faulthandler
import json
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from tests.distributed.exact_worker import wrapped
from tests.distributed.problem import loss, micro
from tests.memory.models import GPT, tokens
from tests.memory.models import loss as gpt_loss
from tests.support import adamw, distance, grouped, mean, samples, sgd, summed
from wholebatch.memory.meter import MemoryMeter

SHARDED = {"hold": ("full", "hold"), "every": ("bf16", "every")}


def sharded_gpt() -> GPT:
    return GPT(layers=2)


class Counted(TorchDispatchMode):
    """Bytes that this rank gives to reductions, as the dispatcher sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"gradients": 0, "small": 0, "collectives": 0}
        self.gathers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gathers += "allgather" in func.__name__
        if func.namespace in ("c10d", "_c10d_functional") and "reduce" in func.__name__:
            tensors = args[1] if "scatter" in func.__name__ else args[0]
            flat = tensors if isinstance(tensors, list | tuple) else [tensors]
            size = sum(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))
            self.bytes["gradients" if size > 512 else "small"] += size
            self.bytes["collectives"] += 1
        return func(*args, **(kwargs or {}))


def bytes_per_window(engine: str, micro_batches: int) -> dict[str, int]:
    model = wrapped(engine)
    acc = wb.Accumulator(model, sgd(model), steps=micro_batches, close=wb.Close(sync="auto"))
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
    try:
        for micro_x in acc.over([torch.ones(2, 4), x]):
            acc.backward(model(micro_x).sum(), units=2)
    except wb.errors.NonFiniteError as error:
        return str(error)
    return "nothing was raised"


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 3),
    ).double()


def exact_batchnorm() -> dict[str, float]:
    """Gradients and running statistics over the global batch of all ranks."""
    reference, local = normed(), normed()
    shares = [7 + 4 * rank for rank in range(dist.get_world_size())]
    batch = samples(sum(shares))
    optimizer = sgd(reference)
    mean(reference, batch).backward()
    optimizer.step()
    start = sum(shares[: dist.get_rank()])
    mine = {k: v[start : start + shares[dist.get_rank()]] for k, v in batch.items()}
    model = DistributedDataParallel(local)
    train = wb.WholeBatch(
        model,
        sgd(model),
        loss=lambda m, micro: wb.Loss(summed(m, micro), len(micro["y"])),
        micro_batch=3,
    )
    train.step(mine)
    origin = normed()

    def update(after: nn.Module) -> list[torch.Tensor]:
        pairs = zip(after.parameters(), origin.parameters(), strict=True)
        return [a.detach() - b.detach() for a, b in pairs]

    return {
        "update": distance(update(local), update(reference)),
        "buffers": distance(
            [b.double() for b in local.buffers()], [b.double() for b in reference.buffers()]
        ),
    }


def running_means() -> dict[str, list[float]]:
    """The running means of a BatchNorm after a window, with one micro-batch less on rank 1."""
    rank, found = dist.get_rank(), {}
    rows = [torch.full((3, 2), 1.0 + rank) + torch.arange(3.0).unsqueeze(1)] * (2 - rank)
    for engine in ("ddp", "fsdp2"):
        norm = nn.BatchNorm1d(2, affine=False)
        inner = nn.Sequential(norm, nn.Linear(2, 1))
        model = DistributedDataParallel(inner) if engine == "ddp" else fully_shard(inner)
        acc = wb.Accumulator(model, sgd(model), steps=2, batchnorm="allow")
        for x in acc.over(rows):
            acc.backward(model(x).square().sum(), units=3)
        assert norm.running_mean is not None
        found[engine] = norm.running_mean.tolist()
    return found


def refused() -> list[str]:
    messages: list[str] = []
    warned = logging.Handler(logging.WARNING)
    warned.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wholebatch").addHandler(warned)
    hooked = DistributedDataParallel(nn.Linear(4, 1))
    hooked.register_comm_hook(None, lambda state, bucket: bucket.get_future())  # type: ignore[attr-defined]
    sparse = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    plain = DistributedDataParallel(nn.Linear(4, 1))
    sharded = wrapped("fsdp2")
    for model, options in (
        (hooked, {}),
        (DistributedDataParallel(nn.Linear(4, 1), static_graph=True), {}),
        (sparse, {}),
        (plain, {"sync": "every"}),
        (plain, {"sync": "sometimes"}),
        (nn.Sequential(plain), {}),
        (fully_shard(nn.Linear(4, 1).bfloat16()), {}),
        (plain.module, {}),
        (plain, {"sync": "none"}),
        (plain.module, {"sync": "none"}),
    ):
        try:
            wb.Accumulator(model, sgd(model), steps=2, **grouped(options))  # type: ignore[arg-type]
            messages.append("accepted")
        except wb.errors.WholebatchError as error:
            messages.append(str(error))
    logging.getLogger("wholebatch").removeHandler(warned)
    acc = wb.Accumulator(sharded, adamw(sharded), steps=4)
    acc.backward(loss(sharded, micro(1, 2)))
    for call in (acc.state_dict, acc.flush):
        try:
            call()
            messages.append("accepted")
        except wb.errors.WholebatchError as error:
            messages.append(str(error))
    return messages


def sharded_windows() -> dict[str, dict[str, float]]:
    """Three windows of three micro-batches, the same on all ranks, beside those of a whole model.

    With the fewest bytes at the peak of one after the first, beyond those of the batch: on a busy
    machine, the thread of a collective may free what it has sent later.
    """
    found = {}
    for name, (precision, sync) in {**SHARDED, "gathered": ("full", "gathered")}.items():
        torch.manual_seed(4)
        whole = sharded_gpt()
        model = copy.deepcopy(whole)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        batch = tokens(6)
        # Both start from powers of two, so that they round alike; Adam would show the difference.
        counts = {"sync": sync, "units": lambda micro: micro["y"].numel()}
        for one, options in ((whole, {}), (model, counts)):
            optimizer = torch.optim.AdamW(one.parameters())
            train = wb.WholeBatch(
                one,
                optimizer,
                loss=gpt_loss,
                precision=precision,
                **grouped({"micro_batch": 2, **options}),
            )
            train.step(batch)
            peaks, gathers = [], []
            for _ in range(2):  # window 2 is tested again, and the third is not
                if one is whole:
                    train.step(batch)
                    continue
                with Meter(model=one, optimizer=optimizer) as meter, Counted() as sent:
                    train.step(batch)
                peaks.append(meter.peak)
                gathers.append(sent.gathers)
        found[name] = {
            "peak": min(peaks) - sum(leaf.nbytes for leaf in batch.values()),
            "gathers": gathers[1],
            "off": distance([full(p) for p in model.parameters()], whole.parameters()),
        }
    return found


class Meter(MemoryMeter):
    """A meter that notices at every operation which parameters FSDP2 has emptied."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for record in list(self._live.values()):
            storage = None if record.ref is None else record.ref()
            if storage is not None:
                self._see_storage(storage, "parameters")
        return super().__torch_dispatch__(func, types, args, kwargs)


def full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def main() -> None:
    faulthandler.dump_traceback_later(220, exit=True)  # a hang shows where
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = {
        "bytes": {
            engine: {str(k): bytes_per_window(engine, k) for k in (1, 5)}
            for engine in ("ddp", "fsdp2")
        },
        "fp16": fp16_skips_together(),
        "nonfinite": nonfinite_raises_everywhere(),
        "batchnorm": exact_batchnorm(),
        "running means": running_means(),
        "refused": refused(),
        "sharded": sharded_windows(),
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump({"ranks": gathered}, file)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
