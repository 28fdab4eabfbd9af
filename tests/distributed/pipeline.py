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
from tests.distributed.problem import VOCABULARY, WIDTH, Block, micro
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


class SeenHere:
    """The gradients that this rank's optimizer saw, None where there was none."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.steps: list[list[Tensor | None]] = []
        optimizer.register_step_pre_hook(
            lambda *_: self.steps.append(
                [None if p.grad is None else p.grad.clone() for p in module.parameters()]
            )
        )


def sizes_of(case: str) -> list[int]:
    # Divides; does not; fewer micro-batches than stages; one sample; the first shape again.
    return [12, 7, 3, 1, 12] if case == "uneven" else [8, 8]


def run(
    schedule: str,
    stages: int,
    group: dist.ProcessGroup | None,
    *,
    case: str = "uneven",
    make: Any = sgd,
    clip: float | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = [index for index in range(stages) if index % ranks == rank]
    parts = nn.ModuleList([Part(index, stages) for index in mine])
    optimizer = make(parts)
    seen = SeenHere(parts, optimizer)
    device = torch.device("cpu")
    built = [
        PipelineStage(part, index, stages, device, group=group)
        for part, index in zip(parts, mine, strict=True)
    ]
    train = wb.Pipeline(
        built if schedule == "interleaved" else built[0],
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
    for number, size in enumerate(sizes_of(case)):
        # Another number of samples, and so of micro-batches, on every replica.
        batches = [micro(100 * number + r, size + 2 * r) for r in range(everyone)]
        if number == 2:  # shorter sequences
            batches = [{k: b[k][:, :7] for k in ("tokens", "labels")} for b in batches]
        given = batches[replica]
        first, last = rank == 0, rank == ranks - 1
        step = train.step(
            *([given["tokens"]] if first else []), target=given["labels"] if last else None
        )
        joined = {k: torch.cat([b[k] for b in batches]) for k in ("tokens", "labels")}
        right = whole.step(joined)
        reported = max(reported, abs(step.loss - right) / right)
        units = int((joined["labels"] != -100).sum())
        assert step.units == units, (step.units, units)
        assert step.micro_batches == -(-len(given["tokens"]) // 2)
        assert (step.clip < 1.0) == (clip is not None), step
    names = [n for n, _ in whole.model.named_parameters()]
    here = [i for i, n in enumerate(names) if int(n.split(".")[0]) in mine]
    worst = 0.0
    assert len(seen.steps) == len(whole.seen.gradients)
    for ours, theirs in zip(seen.steps, whole.seen.gradients, strict=True):
        right_here = [theirs[i] for i in here]
        assert [g is None for g in ours] == ["never" in names[i] for i in here]
        filled = [
            torch.zeros_like(t) if o is None else o for o, t in zip(ours, right_here, strict=True)
        ]
        worst = max(worst, distance(filled, right_here))
    start = [p.detach() for i, p in enumerate(whole.start.parameters()) if i in here]
    final = [p.detach() for i, p in enumerate(whole.model.parameters()) if i in here]
    moved = [p.detach() - s for p, s in zip(parts.parameters(), start, strict=True)]
    return {
        "gradients": worst,
        "update": distance(moved, [f - s for f, s in zip(final, start, strict=True)]),
        "loss": reported,
    }


def skipped(group: dist.ProcessGroup | None) -> dict[str, float]:
    """A loss that is not finite: no stage moves, and the next step is as if nothing had been."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    part = Part(rank, ranks)
    poison = [True]

    def loss(output: Tensor, target: Tensor) -> wb.Loss:
        found = wb.cross_entropy(output, target)
        return wb.Loss(found.total * (float("nan") if poison[0] else 1.0), found.units)

    train = wb.Pipeline(
        PipelineStage(part, rank, ranks, torch.device("cpu"), group=group),
        sgd(part),
        loss=loss,
        micro_batch=2,
        close=wb.Close(nonfinite="skip"),
    )
    batch = micro(5, 6)
    assert train.step(batch["tokens"], target=batch["labels"]).skipped is not None
    before = Part(rank, ranks)
    same = all(map(torch.equal, part.parameters(), before.parameters()))
    assert same
    poison[0] = False
    train.step(batch["tokens"], target=batch["labels"])
    assert (train.updates, train.skipped) == (1, 1)
    saved = train.state_dict()
    train.load_state_dict(saved)
    whole = Whole(whole_model(ranks), sgd, loss=mean_of)
    whole.step({"tokens": batch["tokens"], "labels": batch["labels"]})

    def moved(module: nn.Module) -> list[Tensor]:
        pairs = zip(module.parameters(), before.parameters(), strict=True)
        return [after.detach() - start.detach() for after, start in pairs]

    error = distance(moved(part), moved(whole.model[rank]))
    return {"gradients": 0.0, "update": error, "loss": 0.0}


def refused(group: dist.ProcessGroup | None) -> dict[str, str]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    said: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            said[name] = "accepted"
        except wb.errors.WholebatchError as error:
            said[name] = str(error)

    def built(module: nn.Module | None = None) -> Any:
        module = Part(rank, ranks) if module is None else module
        return PipelineStage(module, rank, ranks, torch.device("cpu"), group=group)

    def pipeline(stage: Any = None, **options: Any) -> wb.Pipeline:
        stage = built() if stage is None else stage
        one = stage[0] if isinstance(stage, list) else stage
        module = one.submod if isinstance(one, PipelineStage) else one
        options = {"loss": wb.cross_entropy, "micro_batch": 2, **options}
        return wb.Pipeline(stage, sgd(module), **grouped(options))

    attempt("schedule", lambda: pipeline(schedule="dualpipe"))
    attempt("module", lambda: pipeline(Part(0, 2)))
    attempt("two stages", lambda: pipeline([built(), built()]))
    attempt("clip by group", lambda: pipeline(clip_norm=[1.0]))
    attempt("ddp", lambda: pipeline(built(DistributedDataParallel(Part(0, 1)))))
    batch_norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    attempt("batchnorm", lambda: pipeline(built(batch_norm)))
    attempt("state", lambda: pipeline().load_state_dict({"kind": "Accumulator"}))
    train = pipeline()
    tokens, labels = micro(1, 4)["tokens"], micro(1, 4)["labels"]
    attempt("no target", lambda: train.step(tokens))
    attempt("no inputs", lambda: train.step(target=labels))
    attempt("sizes", lambda: train.step(*([tokens[:3]] if rank == 0 else []), target=labels))
    alone = dist.new_subgroups(1)[0]
    module = Part(0, 1)
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=alone)
    terms = pipeline(
        stage,
        loss=lambda out, y: wb.Loss.terms({"lm": (out.sum(), 1), "aux": (out.sum(), 1)}),
        schedule="gpipe",
    )
    attempt("terms", lambda: terms.step(tokens, target=labels))
    return said


def report() -> dict[str, Any]:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair, replicas = pairs[rank // 2], across[rank % 2]
    off = {
        "gpipe, 2 stages": run("gpipe", 2, pair, make=adamw, clip=0.05),
        "gpipe, 4 stages": run("gpipe", 4, None),
        "1f1b, 4 stages": run("1f1b", 4, None, make=adamw, clip=0.05),
        "interleaved, 2 x 2 stages": run("interleaved", 4, pair),
        "1f1b, 2 stages, 2 replicas": run("1f1b", 2, pair, clip=0.05, replicas=replicas),
        "skipped": skipped(pair),
    }
    return {"off": off, "refused": refused(pair)}
