"""Run under torchrun: a host that shards its model by FSDP2, and one that replicates it by DDP."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import wholebatch as wb
from tests.support import Whole, distance, mean, mlp, pieces, samples
from wholebatch.errors import WindowError
from wholebatch.integrations.host_window import HostWindows
from wholebatch.stream import CompiledLoss, GivenLoss

CPU = torch.device("cpu")
SIZES = {0: [4, 1, 3], 1: [2, 4, 2]}


def saved_and_loaded(window: HostWindows, again: HostWindows, hosted: nn.Module) -> HostWindows:
    """The open window in another one, from what the first rank would write to a file."""
    saved = [window.state_dict()]
    dist.broadcast_object_list(saved, src=0)
    hosted.zero_grad()
    again.load_state_dict(saved[0])
    return again


def run(
    window: HostWindows, hosted: Any, micros: list[Any], again: HostWindows | None = None
) -> HostWindows:
    """The backwards of one window, the last of which reduces."""
    for place, micro in enumerate(micros):
        last = place + 1 == len(micros)
        if isinstance(hosted, nn.parallel.DistributedDataParallel):
            hosted.require_backward_grad_sync = last
        else:
            hosted.set_requires_gradient_sync(last)
        loss = mean(hosted, micro)
        window.weigh(GivenLoss.of(mean=loss, units=len(micro["y"])))
        with window.host_backward():
            loss.backward()
        if again is not None and place == 1:
            window = saved_and_loaded(window, again, hosted)
    return window


def error(kind: str) -> float:
    """Relative error of one update by a host of this kind, clipped by norm."""
    rank, model = dist.get_rank(), mlp()
    sharded = kind == "fsdp2"
    hosted: Any = fully_shard(model) if sharded else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(hosted.parameters(), lr=0.1)

    def hosts() -> HostWindows:
        kept = "sharded" if sharded else "whole"
        return HostWindows([hosted], [optimizer], device=CPU, gradients=kept)  # type: ignore[arg-type]

    own = pieces(samples(16), [8, 8])[rank]
    again = hosts() if kind == "ddp resumed" else None
    window = run(hosts(), hosted, pieces(own, SIZES[rank]), again)
    window.settle()
    nn.utils.clip_grad_norm_(hosted.parameters(), 0.05)
    optimizer.step()
    whole = Whole(mlp(), clip_norm=0.05)
    whole.step(samples(16))
    trained = [
        (p.full_tensor() if sharded else p).detach() - before.detach()
        for p, before in zip(hosted.parameters(), whole.start.parameters(), strict=True)
    ]
    return distance(trained, whole.updates())


def as_traced(loss: CompiledLoss) -> CompiledLoss:
    loss.executor._plan.compiles = False
    return loss


def compiled(mixed: bool) -> float:
    """Relative error of four updates by graphs, or by graphs and a host's backward in turn."""
    hosted = nn.parallel.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(hosted.parameters(), lr=0.1)
    window = HostWindows([hosted], [optimizer], device=CPU)
    whole = Whole(mlp())

    def loss(micro: Any) -> wb.Loss:
        return wb.cross_entropy(hosted(micro["x"]), micro["y"])

    step, modes = as_traced(window.compiled(loss, "compile")), set()
    for number in (16, 16, 18, 16):
        own = pieces(samples(number), [number // 2] * 2)[dist.get_rank()]
        micros = pieces(own, [3, 1, number // 2 - 4])
        for micro in micros if not mixed else micros[:2]:
            window.take(step(micro))
            modes.add(step.executor.mode)
        if mixed:
            run(window, hosted, micros[2:])
        window.settle()
        optimizer.step()
        optimizer.zero_grad()
        whole.step(samples(number))
    assert "operations" in modes
    return distance(hosted.parameters(), whole.model.parameters())


def compiled_in_own_loop() -> float:
    """Relative error of updates by `Accumulator.compile`; one rank has fewer micro-batches."""
    hosted = nn.parallel.DistributedDataParallel(mlp())
    acc = wb.Accumulator(hosted, torch.optim.SGD(hosted.parameters(), lr=0.1), steps=3)
    whole = Whole(mlp())

    @acc.compile(execute="compile")
    def loss(micro: Any) -> wb.Loss:
        return wb.cross_entropy(hosted(micro["x"]), micro["y"])

    modes = set()
    as_traced(loss)
    sizes = [[3, 3, 2]] * 5, [[3, 1, 4]] * 4 + [[8]]
    mine = []
    for window in range(5):
        own = pieces(samples(16 + window), [8 + window, 8])[1 - dist.get_rank()]
        cut = sizes[dist.get_rank()][window]
        cut = [*cut[:-1], len(own["y"]) - sum(cut[:-1])]
        mine += pieces(own, cut)
        whole.step(samples(16 + window))
    for micro in acc.over(mine):
        acc.backward(loss(micro))
        modes.add(loss.executor.mode)
    assert "operations" in modes
    return distance(hosted.parameters(), whole.model.parameters())


def in_16_bit() -> float:
    """Relative error of bf16 gradients of 64 micro-batches on every rank, beside a float64 sum."""
    model, other = mlp(dtype=torch.bfloat16), mlp(dtype=torch.bfloat16)
    hosted = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(hosted.parameters(), lr=0.1)
    window = HostWindows([hosted], [optimizer], device=CPU)
    micros = pieces(samples(256, dtype=torch.bfloat16), [2] * 128)
    run(window, hosted, micros[64 * dist.get_rank() :][:64])
    window.settle()
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in other.parameters()]
    for micro in micros:
        parts = torch.autograd.grad(mean(other, micro), [*other.parameters()])
        for total, part in zip(sums, parts, strict=True):
            total += part.double() / 128
    return distance([p.grad for p in model.parameters()], sums)  # type: ignore[misc]


def held_back() -> float:
    """0 if a window whose last backward did not reduce is refused."""
    hosted = nn.parallel.DistributedDataParallel(mlp())
    window = HostWindows([hosted], [torch.optim.SGD(hosted.parameters(), lr=0.1)], device=CPU)
    with hosted.no_sync():
        loss = mean(hosted, samples(4))
        window.weigh(GivenLoss.of(mean=loss, units=4))
        with window.host_backward():
            loss.backward()
    try:
        window.settle()
    except WindowError as refused:
        return float("did not reduce" not in str(refused))
    return 1.0


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {kind: error(kind) for kind in ("ddp", "ddp resumed", "fsdp2")}
    found |= {"held back": held_back(), "bf16": in_16_bit()}
    found |= {"compiled": compiled(mixed=False), "mixed": compiled(mixed=True)}
    found |= {"own loop": compiled_in_own_loop()}
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.destroy_process_group()
