"""DeepSpeed's own accumulation on two processes, with and without wholebatch; in float32."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor

import wholebatch as wb
from compare.problem import (
    LEARNING_RATE,
    PROBLEMS,
    Mode,
    Problem,
    Reader,
    Tokens,
    counted,
    distance,
    flat,
    in_two_processes,
    loss_of,
)
from compare.row import Row


def engine_of(stage: int, model: torch.nn.Module, problem: Problem, steps: int) -> Any:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    settings = {
        "train_micro_batch_size_per_gpu": problem.micro_batch,
        "gradient_accumulation_steps": steps,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def whole(problem: Problem) -> Tensor:
    """The undivided global batches, on one process in plain torch."""
    model, data = Reader(torch.float32), Tokens(problem)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for rows in torch.arange(problem.samples).split(problem.batches("whole")[0]):
        optimizer.zero_grad()
        loss_of(model(data.tokens[rows]), data.labels[rows]).backward()
        optimizer.step()
    return flat(model)


def train(problem: Problem, mode: Mode, *, stage: int) -> Tensor:
    """One epoch of DeepSpeed's loop; each process reads every second sample."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ here
    deepspeed.init_distributed("gloo", verbose=False)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, data = Reader(torch.float32), Tokens(problem)
    engine = engine_of(stage, model, problem, problem.steps)
    ours = mode == "ours"
    acc = wb.Accumulator(engine, engine.optimizer, steps=problem.steps) if ours else None
    for rows in torch.arange(rank, problem.samples, ranks).split(problem.micro_batch):
        loss = loss_of(engine(data.tokens[rows]), data.labels[rows])
        if acc is not None:
            acc.backward(mean=loss, units=counted(data.labels[rows]))
        else:
            engine.backward(loss)
            engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return flat(model)


def train_zero_1(problem: Problem, mode: Mode) -> Tensor:
    return train(problem, mode, stage=1)


def train_zero_2(problem: Problem, mode: Mode) -> Tensor:
    return train(problem, mode, stage=2)


def train_zero_3(problem: Problem, mode: Mode) -> Tensor:
    return train(problem, mode, stage=3)


def rows() -> list[Row]:
    """Return one row per stage: masked tokens on two processes."""
    right, start = whole(PROBLEMS["two processes"]), flat(Reader(torch.float32))
    rows = []
    for stage, function in enumerate((train_zero_1, train_zero_2, train_zero_3), 1):
        run = partial(in_two_processes, function)
        own, ours = (distance(run(mode), right, start) for mode in ("own", "ours"))
        version = deepspeed.__version__
        rows.append(Row(f"DeepSpeed ZeRO-{stage}", version, "two processes", own, ours, "float32"))
    return rows
