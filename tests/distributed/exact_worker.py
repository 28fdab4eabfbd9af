"""Run under torchrun: every case of one engine against one process on the global batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.gathered_worker import collectives
from tests.distributed.gathered_worker import whole_batch as whole_batch_as_traced
from tests.distributed.problem import (
    Micro,
    SeenFull,
    errors,
    everyones,
    fresh,
    loss,
    micro,
    undivided,
)
from tests.support import Whole, adamw, sgd


def wrapped(engine: str) -> nn.Module:
    model = fresh()
    if engine == "ddp":
        return DistributedDataParallel(model)
    mesh = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if engine == "hsdp"
        else init_device_mesh("cpu", (dist.get_world_size(),))
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def micros_of(case: str, rank: int) -> list[list[Micro]]:
    """The windows of this rank, each a list of micro-batches.

    "unlabelled": rank 1 begins without a label, and has none in the whole second window.
    """
    if case in ("tokens", "unlabelled"):
        sizes = [[1 + 2 * rank, 3, 1], [2, 1, 4 * rank + 1]]
    elif case == "counts":  # another number of micro-batches on every rank
        sizes = [[2] * (1 + rank % 3), [1] * (3 - rank % 2)]
    elif case == "tail":
        sizes = [[2, 1, 3], [1 + rank]]
    elif case == "exhausted":  # rank 0 runs out of data two windows early
        sizes = [[2, 1, 1]] * (1 if rank == 0 else 3)
    elif case == "unused":  # a branch that only the first micro-batch uses
        sizes = [[2, 1, 3], [1, 1, 2]]
    else:
        raise AssertionError(case)
    return [
        [
            micro(
                1000 * rank + 10 * w + i,
                n,
                branch=case == "unused" and i == 0 and rank == 0,
                labelled=case != "unlabelled" or rank != 1 or (i > 0 and w == 0),
            )
            for i, n in enumerate(window)
        ]
        for w, window in enumerate(sizes)
    ]


@cache
def reference(case: str, clip: float | None, make: Any) -> Whole:
    """One process on the global batch of a case: the same for every engine and entry point."""
    return undivided(everyones(micros_of(case, dist.get_rank())), clip, make)


def by_accumulator(engine: str, case: str, clip: float | None, make: Any, sync: str) -> Any:
    model = wrapped(engine)
    optimizer = make(model)
    seen = SeenFull(model, optimizer)
    mine = micros_of(case, dist.get_rank())
    acc = wb.Accumulator(model, optimizer, steps=3, clip_norm=clip, close=wb.Close(sync=sync))
    for m in acc.over([m for window in mine for m in window]):
        acc.backward(loss(model, m))
    return errors(model, seen, reference(case, clip, make))


def by_run(engine: str, case: str) -> Any:
    """Give the loss function to `run`, by eager code."""
    model = wrapped(engine)
    optimizer = sgd(model)
    seen = SeenFull(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=3, clip_norm=0.05)
    of_micro = partial(loss, model)
    for m in acc.over([m for window in micros_of(case, dist.get_rank()) for m in window]):
        acc.run(of_micro, m)
    return errors(model, seen, reference(case, 0.05, sgd))


def by_run_as_traced() -> Any:
    """DDP: micro-batches of `run` as traced graphs, in other numbers on every rank."""
    model = wrapped("ddp")
    optimizer = sgd(model)
    seen = SeenFull(model, optimizer)
    rank = dist.get_rank()
    mine = [[micro(1000 * rank + 10 * w + i, 2) for i in range(2 + rank)] for w in range(5)]
    acc = wb.Accumulator(model, optimizer, steps=9, clip_norm=0.05, execute="compile")
    of_micro = partial(loss, model)
    executor = acc._functions.prepare(of_micro).executor
    executor._plan.compiles = False
    for window in mine:
        for m in acc.over(window):
            acc.run(of_micro, m)
    assert executor.mode == "operations", executor.notes.history
    return errors(model, seen, undivided(everyones(mine), 0.05, sgd))


def joined(window: list[Micro]) -> Micro:
    """The micro-batches of a window as one whole batch (the branch is per batch)."""
    return {
        "tokens": torch.cat([m["tokens"] for m in window]),
        "labels": torch.cat([m["labels"] for m in window]),
        "branch": False,
    }


def by_whole_batch(engine: str, case: str, clip: float | None, make: Any, known: bool) -> Any:
    model = wrapped(engine)
    optimizer = make(model)
    seen = SeenFull(model, optimizer)
    mine = micros_of(case, dist.get_rank())
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=loss,
        micro_batch=2,
        clip_norm=clip,
        units=(lambda m: (m["labels"] != -100).sum()) if known else None,
    )
    for batch in train.over([joined(window) for window in mine]):
        train.step(batch)
    return errors(model, seen, reference(case, clip, make))


def by_graphs() -> Any:
    """DDP: micro-steps as traced, in other numbers on every rank; rank 0 runs out of data early.

    The ranks hold parts of the optimizer's state. The compiler itself is tested on one process:
    importing it would take half of this job's time.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # Its import warns.

    model = wrapped("ddp")
    make = partial(torch.optim.Adam, lr=0.01)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make)
    seen = SeenFull(model, optimizer)
    rank = dist.get_rank()
    windows = 3 if rank == 0 else 4
    mine = [[micro(1000 * rank + 10 * w, 4 + 2 * rank)] for w in range(windows)]
    train = wb.WholeBatch(
        model, optimizer, loss=loss, micro_batch=2, clip_norm=0.05, execute="compile"
    )
    train._runner.executor._plan.compiles = False
    for batch in train.over([window[0] for window in mine]):
        train.step(batch)
    assert train._runner.executor.mode == "operations"
    return errors(
        model, seen, undivided(everyones(mine), 0.05, lambda whole: make(whole.parameters()))
    )


def nothing_on_one_rank(engine: str) -> Any:
    """Rank 0 has no data from the start: the others' updates are made on it too."""
    model = wrapped(engine)
    optimizer = sgd(model)
    seen = SeenFull(model, optimizer)
    mine = [] if dist.get_rank() == 0 else micros_of("tokens", dist.get_rank())
    acc = wb.Accumulator(model, optimizer, steps=3)
    for m in acc.over([m for window in mine for m in window]):
        acc.backward(loss(model, m))
    return errors(model, seen, undivided(everyones(mine), None, sgd))


def several_accumulators(case: str) -> Any:
    """DDP: two accumulators in one loop, each with a model and a clipping of its own."""
    rank = dist.get_rank()
    models = [wrapped("ddp"), wrapped("ddp")]
    optimizers = [sgd(model) for model in models]
    seen = [SeenFull(*pair) for pair in zip(models, optimizers, strict=True)]
    first, second = (
        wb.Accumulator(model, optimizer, steps=3, clip_norm=clip)
        for model, optimizer, clip in zip(models, optimizers, (None, 0.05), strict=True)
    )
    for m in wb.over([m for window in micros_of(case, rank) for m in window], first, second):
        first.backward(loss(models[0], m))
        second.backward(loss(models[1], m))
    found = [
        errors(model, one, reference(case, clip, sgd))
        for model, one, clip in zip(models, seen, (None, 0.05), strict=True)
    ]
    return {key: max(one[key] for one in found) for key in found[0]}


def announced(case: str) -> Any:
    """DDP: windows whose units are announced; a rank without data announces none."""
    model = wrapped("ddp")
    optimizer = sgd(model)
    seen = SeenFull(model, optimizer)
    mine = micros_of(case, dist.get_rank())
    acc = wb.Accumulator(model, optimizer, steps=3)
    for index, m in enumerate(acc.over([m for window in mine for m in window])):
        if index % 3 == 0:
            acc.announce({"tokens": sum((m["labels"] != -100).sum() for m in mine[index // 3])})
        acc.backward(wb.Loss.terms({"tokens": loss(model, m)}))
    return errors(model, seen, reference(case, None, sgd))


def refused_loops(engine: str) -> dict[str, str]:
    """Loops that ranks cannot share, by the message of the error, which all ranks get."""
    rank, found = dist.get_rank(), {}

    def attempt(name: str, steps: tuple[int, ...], items: int, body: Callable[..., Any]) -> None:
        models = [wrapped(engine) for _ in steps]
        accumulators = [
            wb.Accumulator(model, sgd(model), steps=number)
            for model, number in zip(models, steps, strict=True)
        ]
        try:
            for m in wb.over([micro(i, 2) for i in range(items)], *accumulators):
                body(m, *zip(accumulators, models, strict=True))
        except wb.errors.WholebatchError as error:
            found[name] = str(error)

    def in_order(m: Micro, *pairs: Any) -> None:
        for acc, model in pairs:
            acc.backward(loss(model, m))

    def announcing(m: Micro, *pairs: Any) -> None:
        pairs[0][0].announce({"tokens": 1})

    if engine == "ddp":
        attempt("steps", (2, 3), 6, in_order)
        attempt("order", (2, 2), 2, lambda m, *pairs: in_order(m, *reversed(pairs)))
        attempt("first", (2, 2), 2 * rank, in_order)
        attempt("announce", (2, 2), 2, announcing)
    else:
        attempt("no data", (2,), 2 * rank, in_order)
    return found


def skipped_and_flushed() -> Any:
    """DDP: a body that skips its last micro-batch, and a window closed by flush()."""
    model = wrapped("ddp")
    optimizer = sgd(model)
    seen = SeenFull(model, optimizer)
    rank = dist.get_rank()
    mine = micros_of("tokens", rank)
    acc = wb.Accumulator(model, optimizer, steps=3)
    for i, m in enumerate(acc.over(mine[0])):
        if i != 2 or rank == 0:
            acc.backward(loss(model, m))
    for m in mine[1][:2]:
        acc.backward(loss(model, m))
    acc.flush()
    kept = [mine[0] if rank == 0 else mine[0][:2], mine[1][:2]]
    return errors(model, seen, undivided(everyones(kept), None, sgd))


def no_gradient_anywhere() -> dict[str, float]:
    """A parameter without gradient on any rank keeps none: not even weight decay moves it."""
    model = wrapped("ddp")
    acc = wb.Accumulator(model, torch.optim.AdamW(model.parameters(), weight_decay=0.5), steps=2)
    before = model.module.never.weight.detach().clone()
    for m in acc.over(micros_of("tail", dist.get_rank())[0]):
        acc.backward(loss(model, m))
    moved = (model.module.never.weight - before).abs().max().item()
    return {"gradients": moved, "update": moved}


def cases_of(engine: str) -> dict[str, Callable[[], Any]]:
    """Return the runs of one engine. Options take turns over the cases: pairs are enough.

    Whole windows without options are in tests/split_invariance/engines.py.
    """
    cases: dict[str, Callable[[], Any]] = {}
    exact = ["tail", "exhausted", "unlabelled"]
    if engine == "hsdp":  # FSDP2 has all of them, on half as many ranks
        exact = ["exhausted", "unlabelled"]
    for turn, case in enumerate(exact):
        clip, make = ((None, sgd), (0.05, adamw))[turn % 2]
        cases[f"accumulator {case} {make.__name__} clip={clip}"] = partial(
            by_accumulator, engine, case, clip, make, "hold"
        )
        known = turn % 2 == 1
        others: dict[str, Callable[[], Any]] = {
            f"run {case}": partial(by_run, engine, case),
            f"whole batch {case} known={known}": partial(
                by_whole_batch, engine, case, 0.05, sgd, known
            ),
        }
        if engine != "ddp":
            sync = ("every", "gathered")[turn % 2]
            others[f"accumulator {case} {sync}"] = partial(
                by_accumulator, engine, case, 0.05, sgd, sync
            )
        if engine == "hsdp":
            others = dict([list(others.items())[turn]])
        cases |= others
    if engine == "ddp":
        for clip, make in ((None, sgd), (0.05, adamw)):
            cases[f"accumulator unused {make.__name__}"] = partial(
                by_accumulator, engine, "unused", clip, make, "hold"
            )
        cases["run unused"] = partial(by_run, engine, "unused")
        cases["run as traced"] = by_run_as_traced
        cases["no data on rank 0"] = partial(nothing_on_one_rank, engine)
        cases["skipped and flushed"] = skipped_and_flushed
        for case in ("tail", "exhausted"):
            cases[f"several accumulators {case}"] = partial(several_accumulators, case)
            cases[f"announced {case}"] = partial(announced, case)
        cases["adamw: ZeRO-1 as traced"] = by_graphs
        cases["no gradient anywhere"] = no_gradient_anywhere
    if engine == "hsdp":
        cases["gathered, as traced"] = partial(whole_batch_as_traced, (2, 2), sgd)
    return cases


def main() -> None:
    report, engines = sys.argv[1], sys.argv[2:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results: dict[str, dict[str, dict[str, float]]] = {
        engine: {name: run() for name, run in cases_of(engine).items()} for engine in engines
    }
    refusals = {engine: refused_loops(engine) for engine in engines if engine != "hsdp"}
    moved = collectives((2, 2), 2) if "hsdp" in engines else {}
    # Every rank must have made the same update: gather the worst.
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, refusals)
    if dist.get_rank() == 0:
        worst = {
            engine: {
                name: {key: max(r[engine][name][key] for r in gathered) for key in row}
                for name, row in rows.items()
            }
            for engine, rows in results.items()
        }
        with open(report, "w", encoding="utf-8") as file:
            json.dump({"errors": worst, "refusals": everyone, "collectives": moved}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
