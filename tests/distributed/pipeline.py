"""Pipelines on 4 ranks against one process on the undivided batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.problem import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Block,
    Errors,
    SeenFull,
    apart,
    micro,
    outcome,
)
from tests.support import Whole, adamw, distance, grouped, sgd


class Part(nn.Module):
    """A stage; with a layer that nothing uses, which must keep no gradient."""

    def __init__(self, index: int, of: int) -> None:
        super().__init__()
        torch.manual_seed(10 + index)
        layers: list[nn.Module] = [Block()]
        if index == 0:
            layers.insert(0, nn.Embedding(VOCABULARY, WIDTH))
        if index == of - 1:
            layers.append(nn.Linear(WIDTH, VOCABULARY))
        self.layers = nn.Sequential(*layers)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def whole_model(stages: int) -> nn.Sequential:
    return nn.Sequential(*(Part(index, stages) for index in range(stages)))


def mean_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(
        model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    )


SIZES = (12, 7, 3, 1, 12)
"""Divides; does not; fewer micro-batches than stages; one sample; the first shape again."""


def run(
    schedule: str,
    stages: int,
    group: dist.ProcessGroup | None,
    *,
    make: Any = sgd,
    clip: float | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> Errors:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = range(rank, stages, ranks)
    parts = nn.ModuleList([Part(index, stages) for index in mine])
    optimizer = make(parts)
    recorded = SeenFull(parts, optimizer)
    built = [
        PipelineStage(part, index, stages, torch.device("cpu"), group=group)
        for part, index in zip(parts, mine, strict=True)
    ]
    train = wb.Pipeline(
        built[0],
        optimizer,
        loss=wb.cross_entropy,
        micro_batch=2,
        schedule=schedule,
        clip_norm=clip,
        data_parallel=replicas,
    )
    whole = Whole(whole_model(stages), make, loss=mean_of, clip_norm=clip)
    replica = dist.get_rank(replicas) if replicas is not None else 0
    everyone = dist.get_world_size(replicas) if replicas is not None else 1
    reported = 0.0
    for number, size in enumerate(SIZES):
        # Another number of samples, and so of micro-batches, on every replica.
        batches = [micro(100 * number + r, size + 2 * r) for r in range(everyone)]
        length = 7 if number == 2 else LENGTH  # shorter sequences
        batches = [{k: b[k][:, :length] for k in ("tokens", "labels")} for b in batches]
        inputs = [batches[replica]["tokens"]] if rank == 0 else []
        labels = batches[replica]["labels"] if rank == ranks - 1 else None
        step = train.step(*inputs, target=labels)
        joined = {k: torch.cat([b[k] for b in batches]) for k in ("tokens", "labels")}
        right = whole.step(joined)
        reported = max(reported, abs(step.loss - right) / right)
        assert step.units == (joined["labels"] != -100).sum()
        assert (step.clip < 1.0) == (clip is not None), step
    named = [*whole.model.named_parameters()]
    here = [i for i, (name, _) in enumerate(named) if int(name.split(".")[0]) in mine]
    unused = ["never" in named[i][0] for i in here]
    assert all([g is None for g in gradients] == unused for gradients in recorded.steps)
    wanted = [[step[i] for i in here] for step in whole.seen.gradients]
    start = [*whole.start.parameters()]
    moved = [p - start[i] for p, i in zip(parts.parameters(), here, strict=True)]
    updates = whole.updates()
    return {
        "gradients": max(apart(*pair) for pair in zip(recorded.steps, wanted, strict=True)),
        "update": distance(moved, [updates[i] for i in here]),
        "loss": reported,
    }


def skipped(group: dist.ProcessGroup | None) -> Errors:
    """A loss that is not finite moves no stage."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    part = Part(rank, ranks)

    def lost(output: Tensor, target: Tensor) -> wb.Loss:
        loss = wb.cross_entropy(output, target)
        return wb.Loss(loss.total * float("nan"), loss.units)

    train = wb.Pipeline(
        PipelineStage(part, rank, ranks, torch.device("cpu"), group=group),
        sgd(part),
        loss=lost,
        micro_batch=2,
        close=wb.Close(nonfinite="skip"),
    )
    batch = micro(5, 6)
    assert train.step(batch["tokens"], target=batch["labels"]).skipped is not None
    assert (train.updates, train.skipped) == (0, 1)
    return {"update": distance(part.parameters(), Part(rank, ranks).parameters())}


def refused(group: dist.ProcessGroup | None) -> dict[str, str]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def built(module: nn.Module | None = None) -> Any:
        module = Part(rank, ranks) if module is None else module
        return PipelineStage(module, rank, ranks, torch.device("cpu"), group=group)

    def pipeline(stage: Any = None, **options: Any) -> wb.Pipeline:
        stage = built() if stage is None else stage
        first = stage[0] if isinstance(stage, list) else stage
        module = first.submod if isinstance(first, PipelineStage) else first
        options = {"loss": wb.cross_entropy, "micro_batch": 2, **options}
        return wb.Pipeline(stage, sgd(module), **grouped(options))

    train = pipeline()
    tokens, labels = micro(1, 4)["tokens"], micro(1, 4)["labels"]
    cut = [tokens[:3]] if rank == 0 else []
    batch_norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    alone = PipelineStage(Part(0, 1), 0, 1, torch.device("cpu"), group=dist.new_subgroups(1)[0])
    terms = pipeline(
        alone,
        loss=lambda out, y: wb.Loss.terms({"lm": (out.sum(), 1), "aux": (out.sum(), 1)}),
        schedule="gpipe",
    )
    calls: dict[str, Callable[[], Any]] = {
        "schedule": lambda: pipeline(schedule="dualpipe"),
        "module": lambda: pipeline(Part(0, 2)),
        "clip by group": lambda: pipeline(clip_norm=[1.0]),
        "ddp": lambda: pipeline(built(DistributedDataParallel(Part(0, 1)))),
        "batchnorm": lambda: pipeline(built(batch_norm)),
        "state": lambda: pipeline().load_state_dict({"kind": "Accumulator"}),
        "no target": lambda: train.step(tokens),
        "no inputs": lambda: train.step(target=labels),
        "sizes": lambda: train.step(*cut, target=labels),
        "terms": lambda: terms.step(tokens, target=labels),
    }
    return {name: outcome(call) for name, call in calls.items()}


def report() -> dict[str, Any]:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair, replicas = pairs[rank // 2], across[rank % 2]
    off = {
        "gpipe, 2 stages": run("gpipe", 2, pair, make=adamw, clip=0.05),
        "gpipe, 4 stages": run("gpipe", 4, None),
        "1f1b, 4 stages": run("1f1b", 4, None, make=adamw, clip=0.05),
        "1f1b, 2 stages, 2 replicas": run("1f1b", 2, pair, clip=0.05, replicas=replicas),
        "skipped": skipped(pair),
    }
    return {"off": off, "refused": refused(pair)}
