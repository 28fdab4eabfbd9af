"""One update of the same eight sequences, by plain torch undivided and by each engine on ranks.

Without a process group it is the undivided batch. On ranks each takes another number of sequences.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from functools import partial
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.distributed.problem import Micro, Model, fresh, full, global_mean, micro

SAMPLES = 8
sgd = partial(torch.optim.SGD, lr=1.0)
SHARES = {2: [5, 3], 4: [3, 2, 2, 1]}
Moved = dict[str, Tensor]


def whole() -> Micro:
    batch = micro(7, SAMPLES)
    return {"tokens": batch["tokens"], "labels": batch["labels"]}


def loss_of(model: nn.Module, batch: Micro) -> wb.Loss:
    return wb.cross_entropy(model(batch["tokens"]), batch["labels"])


def share(ranks: int, rank: int) -> Micro:
    return {name: value.split(SHARES[ranks])[rank] for name, value in whole().items()}


def moved(named: Iterable[tuple[str, Tensor]]) -> Moved:
    """How far the parameters have moved; by SGD, that is the gradient."""
    start = dict(fresh().named_parameters())
    names = ((name.removeprefix("module."), p) for name, p in named)
    return {name: (full(p) - start[name]).detach() for name, p in names}


def undivided() -> Moved:
    model = fresh()
    global_mean(model, [{**whole(), "branch": False}]).backward()
    sgd(model.parameters()).step()
    return moved(model.named_parameters())


def engine_of(kind: str) -> tuple[nn.Module, Micro, str]:
    """Return the wrapped model, this rank's batch and how it is reduced."""
    model, ranks = fresh(), dist.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(model), share(ranks, dist.get_rank()), "auto"
    if kind == "tensor parallel":
        sharded = ranks == 4
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        if not sharded:
            return model, whole(), "auto"
        fully_shard(model, mesh=mesh["dp"])
        return model, share(2, mesh.get_local_rank("dp")), "hold"
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), share(ranks, dist.get_rank()), kind


def by_engine(micro_batch: int, *, kind: str, entry: str) -> Moved:
    """Make the update by an accumulator's loop, or by a WholeBatch."""
    if not dist.is_initialized():
        return undivided()
    model, batch, sync = engine_of(kind)
    optimizer, close = sgd(model.parameters()), wb.Close(sync=sync)  # type: ignore[arg-type]
    if entry == "WholeBatch":
        train = wb.WholeBatch(model, optimizer, loss=loss_of, micro_batch=micro_batch, close=close)
        train.step(batch)
    else:
        acc = wb.Accumulator(model, optimizer, steps=SAMPLES, close=close)
        for part in acc.over(wb.split(batch, micro_batch)):
            if entry == "run":
                acc.run(partial(loss_of, model), part)
            else:
                acc.backward(loss_of(model, part))
        assert acc.updates == 1
    return moved(model.named_parameters())


class FirstStage(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed, self.block = model.embed, model.blocks[0]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens))


def by_pipeline(micro_batch: int, *, schedule: str) -> Moved:
    """Two stages; on four ranks, two replicas of each."""
    if not dist.is_initialized():
        return undivided()
    model, ranks, rank = fresh(), dist.get_world_size(), dist.get_rank()
    stage = [FirstStage(model), nn.Sequential(model.blocks[1], model.read)][rank % 2]
    pipes = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    replicas = [dist.new_group(list(range(place, ranks, 2))) for place in range(2)]
    batch = whole() if ranks == 2 else share(2, rank // 2)
    train = wb.Pipeline(
        PipelineStage(stage, rank % 2, 2, torch.device("cpu"), group=pipes[rank // 2]),
        sgd(stage.parameters()),
        loss=wb.cross_entropy,
        micro_batch=micro_batch,
        schedule=schedule,  # type: ignore[arg-type]
        data_parallel=replicas[rank % 2] if ranks == 4 else None,
    )
    train.step(batch["tokens"], target=batch["labels"])
    held = set(map(id, stage.parameters()))
    return moved((name, p) for name, p in model.named_parameters() if id(p) in held)


def by_deepspeed(micro_batch: int, *, stage: int) -> Moved:
    """In float32, as DeepSpeed's own reduction is."""
    if not dist.is_initialized():
        return undivided()
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    model = fresh().float()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 5,  # not what the window has: it must not matter
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 300},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model.parameters()), config=config)
    acc = wb.Accumulator(engine, engine.optimizer, steps=SAMPLES)
    for part in acc.over(wb.split(share(2, dist.get_rank()), micro_batch)):
        acc.backward(loss_of(engine, part))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return moved((name, p.double()) for name, p in copy.deepcopy(model).named_parameters())


def by_trainer(micro_batch: int, *, kind: str) -> nn.Module:
    """`exact(Trainer)` and `exact(SFTTrainer)` on a tiny Llama."""
    from transformers import Trainer, TrainingArguments

    from tests.integrations import trl_training as runs
    from wholebatch.integrations.transformers import exact

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    batches = -(-runs.SAMPLES // (micro_batch * ranks))  # Accelerate repeats samples in the last
    if kind == "SFTTrainer":
        words = random.Random(3)
        rows: list[Any] = [{"text": runs.text(words, 2, 12)} for _ in range(runs.SAMPLES)]
        trainer: Any = runs.built("SFT", exact, batches, rows, runs.IN_ORDER)
    else:
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(runs.WORDS, (runs.SAMPLES, 6), generator=draw).tolist()
        rows = [
            {"input_ids": row, "labels": [-100] * (place % 5) + row[place % 5 :]}
            for place, row in enumerate(tokens)
        ]
        args = TrainingArguments(**runs.settings(batches, runs.SAMPLES, mkdtemp()))
        trainer = exact(Trainer)(model=runs.llama(), args=args, train_dataset=rows)
    trainer.train()
    return trainer.accelerator.unwrap_model(trainer.model)


def on(ranks: int) -> dict[str, Callable[[int], Any]]:
    """Return every engine that so many ranks can make."""
    kinds = ("hold", "every", "gathered") if ranks == 4 else ("ddp", "hold", "every", "gathered")
    entries = ("backward", "WholeBatch", "run")
    cases: dict[str, Callable[[int], Any]] = {}
    for turn, kind in enumerate((*kinds, "tensor parallel")):
        for entry in entries if ranks == 2 else (entries[turn % 3],):
            cases[f"{kind}, {entry}"] = partial(by_engine, kind=kind, entry=entry)
    for schedule in ("gpipe", "1f1b")[: 4 // ranks]:
        cases[f"pipeline, {schedule}"] = partial(by_pipeline, schedule=schedule)
    return cases
