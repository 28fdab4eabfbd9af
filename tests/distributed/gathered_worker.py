"""Run under torchrun: FSDP2 with parameters gathered once per window, recorded."""

from __future__ import annotations

import json
import sys
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
from tests.distributed.problem import (
    Micro,
    Model,
    SeenFull,
    errors,
    everyones,
    fresh,
    full,
    loss,
    micro,
    undivided,
)
from tests.support import adamw, distance, sgd

GATHERED = wb.Close(sync="gathered")


def sharded(mesh_shape: tuple[int, ...], model: Model | None = None, **how: Any) -> Model:
    model = fresh() if model is None else model
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def windows(count: int, samples: int) -> list[list[Micro]]:
    """Windows of this rank: another number of samples, and so of micro-batches, on each."""
    rank = dist.get_rank()
    return [[micro(1000 * rank + 10 * w, samples + 2 * rank)] for w in range(count)]


def whole_batch(shape: tuple[int, ...], make: Any, **options: Any) -> dict[str, float]:
    """`WholeBatch` takes gathered windows by itself, as traced graphs; rank 0 ends early."""
    model = sharded(shape)
    optimizer = make(model)
    seen = SeenFull(model, optimizer)
    mine = windows(3 if dist.get_rank() == 0 else 4, 4)
    train = wb.WholeBatch(
        model, optimizer, loss=loss, micro_batch=2, clip_norm=0.05, execute="compile", **options
    )
    executor = train._runner.executor
    executor._plan.compiles = False
    for batch in train.over([window[0] for window in mine]):
        train.step(batch)
    assert executor.mode == "operations", executor.notes.history
    return errors(model, seen, undivided(everyones(mine), 0.05, make))


def own_loop(shape: tuple[int, ...], by_run: bool, execute: str) -> dict[str, float]:
    """Loops of `over`, with other numbers of micro-batches on every rank."""
    model = sharded(shape)
    optimizer = sgd(model)
    seen = SeenFull(model, optimizer)
    rank = dist.get_rank()
    mine = [[micro(1000 * rank + 10 * w + i, 2) for i in range(2 + rank)] for w in range(4)]
    acc = wb.Accumulator(model, optimizer, steps=9, clip_norm=0.05, close=GATHERED, execute=execute)
    of_micro = partial(loss, model)
    if by_run and execute == "compile":
        acc._functions.prepare(of_micro).executor._plan.compiles = False
    for window in mine:
        for m in acc.over(window):
            if by_run:
                acc.run(of_micro, m)
            else:
                acc.backward(loss(model, m))
        assert all(hasattr(p, "full_tensor") for p in model.parameters())
    return errors(model, seen, undivided(everyones(mine), 0.05, sgd))


def uses_other_layers() -> dict[str, float]:
    """A branch that one rank uses in one micro-batch; a layer that none uses keeps no gradient."""
    model = sharded((dist.get_world_size(),))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    rank = dist.get_rank()
    mine = [[micro(1000 * rank + i, 2, branch=rank == 0 and i == 1) for i in range(3)]]
    before = full(model.never.weight.detach()).clone()
    seen = SeenFull(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=3, close=GATHERED)
    for m in acc.over(mine[0]):
        acc.backward(loss(model, m))
    moved = (full(model.never.weight.detach()) - before).abs().max().item()
    right = undivided(everyones(mine), None, partial(_decayed, weight_decay=0.5))
    return errors(model, seen, right) | {"gradients": moved}


def _decayed(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=weight_decay)


def cases() -> dict[str, Callable[[], dict[str, float]]]:
    shape = (dist.get_world_size(),)
    return {
        "backward": partial(own_loop, shape, False, "eager"),
        "run": partial(own_loop, shape, True, "compile"),
        "adamw whole batch": partial(whole_batch, shape, adamw),
        "auto micro_batch": partial(auto, shape),
        "other layers": uses_other_layers,
        "hooks and gradient()": hooks_and_gradient,
    }


def auto(shape: tuple[int, ...]) -> dict[str, float]:
    """A window that runs out of memory on one rank begins again there, smaller."""
    model = sharded(shape)
    optimizer = sgd(model)
    seen = SeenFull(model, optimizer)
    mine = windows(2, 4)
    rank = dist.get_rank()

    def scarce(model: nn.Module, m: Micro) -> wb.Loss:
        if rank == 1 and len(m["tokens"]) > 2:
            raise torch.OutOfMemoryError("as if there were no room")
        return loss(model, m)

    train = wb.WholeBatch(model, optimizer, loss=scarce, micro_batch="auto", execute="eager")
    for batch in train.over([window[0] for window in mine]):
        train.step(batch)
    assert (train.recoveries > 0) == (rank == 1)
    return errors(model, seen, undivided(everyones(mine), None, sgd))


def hooks_and_gradient() -> dict[str, float]:
    """`gradient()` leaves the shards' gradients; a hook sees the whole, normalised one once."""
    model = sharded((dist.get_world_size(),))
    optimizer = sgd(model)
    seen = SeenFull(model, optimizer)
    calls: list[Tensor] = []
    model.read.weight.register_hook(lambda g: calls.append(full(g).clone()))
    mine = windows(2, 4)
    train = wb.WholeBatch(model, None, loss=loss, micro_batch=2, execute="eager")
    for window in mine:
        train.gradient(window[0])
        optimizer.step()
        optimizer.zero_grad()
    right = undivided(everyones(mine), None, sgd)
    assert len(calls) == 2
    return errors(model, seen, right)


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
    with Counted() as seen:
        train.step(batch)
    return seen.counts


def in_sixteen_bit() -> dict[str, float]:
    """A MixedPrecisionPolicy: weights whole in bf16, gradients in float32, as near as one process.

    Return the distances of the gradient from float64, of gathered windows, FSDP2's own and the
    undivided batch.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [micro(100 * rank + i, 2) for i in range(8)]
    all_of_them = everyones([mine])[0]
    right = undivided([all_of_them], None, sgd).seen.gradients[0]

    def off(gradients: list[Tensor | None]) -> float:
        filled = [
            torch.zeros_like(r) if g is None else g.double()
            for g, r in zip(gradients, right, strict=True)
        ]
        return distance(filled, right)

    def by(sync: Any) -> float:
        model = sharded((size,), fresh().float(), mp_policy=policy)
        optimizer = sgd(model)
        seen = SeenFull(model, optimizer)
        acc = wb.Accumulator(model, optimizer, steps=8, close=wb.Close(sync=sync))
        for m in acc.over(mine):
            acc.backward(loss(model, m))
        return off(seen.steps[0])

    return {"gathered": by("gathered"), "hold": by("hold")}


def compiled_blocks() -> dict[str, dict[str, float]]:
    """Blocks that the user compiled are taken as they are, in eager and in gathered windows."""
    found = {}
    for sync in ("hold", "gathered"):
        model = fresh()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        model = sharded((dist.get_world_size(),), model)
        optimizer = sgd(model)
        seen = SeenFull(model, optimizer)
        mine = windows(2, 4)
        train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=2, close=wb.Close(sync=sync))
        for batch in train.over([window[0] for window in mine]):
            train.step(batch)
        found[sync] = errors(model, seen, undivided(everyones(mine), None, sgd))
    return found


def refused() -> dict[str, str]:
    found = {}

    def attempt(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    shape = (dist.get_world_size(),)
    model = sharded(shape)
    acc = wb.Accumulator(model, sgd(model), steps=2, close=GATHERED)
    attempt("forward before the window", lambda: acc.backward(loss(model, micro(1, 2))))
    model = sharded(shape)
    rank = dist.get_rank()

    def scarce(model: nn.Module, m: Micro) -> wb.Loss:
        if rank == 1:
            raise torch.OutOfMemoryError("as if there were no room")
        return loss(model, m)

    train = wb.WholeBatch(model, sgd(model), loss=scarce, micro_batch="auto", audit=False)
    attempt("no room on one rank", lambda: train.step(micro(1, 2)))
    found["shards after it"] = str(all(hasattr(p, "full_tensor") for p in model.parameters()))
    return found


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    only = sys.argv[2:]
    found: dict[str, Any] = {
        "errors": {name: run() for name, run in cases().items() if not only or name in only}
    }
    if not only:
        found["collectives"] = {n: collectives((ranks,), n) for n in (1, 2, 5)}
        found["sixteen bit"] = in_sixteen_bit()
        found["compiled blocks"] = compiled_blocks()
        found["refused"] = refused()
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump({"ranks": everyone}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
