"""FSDP2 with parameters gathered once per window: what no program of tests/programs draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wholebatch as wb
from tests.distributed.exact import compared
from tests.distributed.problem import (
    Errors,
    Micro,
    SeenFull,
    apart,
    everyones,
    fresh,
    full,
    loss,
    micro,
    undivided,
    wrapped,
)
from tests.support import sgd

GATHERED = wb.Close(sync="gathered")


def sharded(mesh_shape: tuple[int, ...], model: Any = None, **how: Any) -> Any:
    model = fresh() if model is None else model
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def windows() -> list[list[Micro]]:
    """Two windows of this rank: another number of samples on each rank."""
    rank = dist.get_rank()
    return [[micro(1000 * rank + 10 * w, 4 + 2 * rank)] for w in range(2)]


def uses_other_layers() -> Errors:
    """A branch that one rank uses in one micro-batch; a layer that none uses keeps no gradient."""
    rank = dist.get_rank()
    mine = [[micro(1000 * rank + i, 2, branch=rank == 0 and i == 1) for i in range(3)]]

    def train(model: Any, optimizer: Any) -> None:
        before = full(model.never.weight.detach()).clone()
        acc = wb.Accumulator(model, optimizer, steps=3, close=GATHERED)
        for m in acc.over(mine[0]):
            acc.backward(loss(model, m))
        assert torch.equal(full(model.never.weight.detach()), before)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)

    return compared(train, mine, make, engine="fsdp2")


def recovers() -> Errors:
    """A window that runs out of memory on one rank begins again there, smaller."""
    mine, rank = windows(), dist.get_rank()

    def scarce(model: nn.Module, m: Micro) -> wb.Loss:
        if rank == 1 and len(m["tokens"]) > 2:
            raise torch.OutOfMemoryError("as if there were no room")
        return loss(model, m)

    def train(model: Any, optimizer: Any) -> None:
        whole = wb.WholeBatch(model, optimizer, loss=scarce, micro_batch="auto", execute="eager")
        for batch in whole.over([window[0] for window in mine]):
            whole.step(batch)
        assert (whole.recoveries > 0) == (rank == 1)

    return compared(train, mine, engine="fsdp2")


def hooks() -> Errors:
    """A hook sees the whole, normalised gradient once per window."""
    mine = windows()

    def train(model: Any, optimizer: Any) -> None:
        calls: list[Tensor] = []
        model.read.weight.register_hook(lambda g: calls.append(full(g).clone()))
        whole = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=2, execute="eager")
        for window in mine:
            whole.step(window[0])
        assert len(calls) == 2

    return compared(train, mine, engine="fsdp2")


class Counted(TorchDispatchMode):
    """The collectives that move parameters and gradients; small ones are sums of units."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.strip("_").partition("_.")[0]
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            if max(t.numel() for t in tensors) > 64:
                self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def collectives(shape: tuple[int, ...], micro_batches: int) -> dict[str, int]:
    model = sharded(shape)
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=2, audit=False)
    batch = micro(dist.get_rank(), 2 * micro_batches)
    train.step(batch)
    train.step(batch)
    with Counted() as recorded:
        train.step(batch)
    return recorded.counts


def in_sixteen_bit(sync: Any) -> float:
    """Return the gradient's distance from float64: weights in bf16, gradients in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mine = [micro(100 * dist.get_rank() + i, 2) for i in range(8)]
    right = undivided(everyones([mine]), None, sgd).seen.gradients[0]
    model = sharded((dist.get_world_size(),), fresh().float(), mp_policy=policy)
    optimizer = sgd(model)
    recorded = SeenFull(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=8, close=wb.Close(sync=sync))
    for m in acc.over(mine):
        acc.backward(loss(model, m))
    return apart(recorded.steps[0], right)


def refused() -> dict[str, str]:
    told = {}

    def attempt(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"

    def scarce(model: nn.Module, m: Micro) -> wb.Loss:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("as if there were no room")
        return loss(model, m)

    model = wrapped("fsdp2")
    acc = wb.Accumulator(model, sgd(model), steps=2, close=GATHERED)
    attempt("forward before the window", lambda: acc.backward(loss(model, micro(1, 2))))
    model = wrapped("fsdp2")
    train = partial(wb.WholeBatch, model, sgd(model))
    chosen = train(loss=scarce, micro_batch="auto", audit=False)
    attempt("no room on one rank", lambda: chosen.step(micro(1, 2)))
    told["shards after it"] = str(all(hasattr(p, "full_tensor") for p in model.parameters()))
    return told


def report() -> dict[str, Any]:
    ranks = dist.get_world_size()
    if ranks == 4:  # the shards of replicas are added up
        return {"collectives": collectives((2, 2), 2)}
    off = {"adamw other layers": uses_other_layers(), "auto": recovers(), "hooks": hooks()}
    return {
        "off": off,
        "collectives": [collectives((ranks,), number) for number in (1, 2, 5)],
        "sixteen bit": {sync: in_sixteen_bit(sync) for sync in ("gathered", "hold")},
        "refused": refused(),
    }
