"""Updates that no program of tests/programs makes: unused layers, no data, shared loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import wholebatch as wb
from tests.distributed.problem import (
    Errors,
    Micro,
    SeenFull,
    errors,
    everyones,
    fresh,
    global_mean,
    joined,
    loss,
    micro,
    micros_of,
    outcome,
    undivided,
    wrapped,
)
from tests.support import Whole, adamw, sgd

CLIP = 0.05
Windows = list[list[Micro]]


def compared(
    train: Callable[[Any, Any], None],
    mine: Windows,
    make: Any = sgd,
    clip: float | None = None,
    engine: str = "ddp",
    undivided: Callable[..., Whole] = undivided,
) -> Errors:
    """Train a model by `train(model, optimizer)`, and compare with the undivided global batches."""
    model = wrapped(engine)
    optimizer = make(model)
    recorded = SeenFull(model, optimizer)
    train(model, optimizer)
    return errors(model, recorded, undivided(everyones(mine), clip, make))


def looped(mine: Windows, make: Any = sgd, clip: float | None = None) -> Errors:
    def train(model: Any, optimizer: Any) -> None:
        acc = wb.Accumulator(model, optimizer, steps=3, clip_norm=clip)
        for m in acc.over([m for window in mine for m in window]):
            acc.backward(loss(model, m))

    return compared(train, mine, make, clip)


def several_accumulators(mine: Windows) -> Errors:
    """Two accumulators in one loop, each with a model and a clipping of its own."""
    other = wrapped("ddp")

    def train(model: Any, optimizer: Any) -> None:
        first = wb.Accumulator(model, optimizer, steps=3, clip_norm=CLIP)
        second = wb.Accumulator(other, sgd(other), steps=3)
        for m in wb.over([m for window in mine for m in window], first, second):
            first.backward(loss(model, m))
            second.backward(loss(other, m))

    return compared(train, mine, sgd, CLIP)


def announced(mine: Windows) -> Errors:
    """Windows whose units are announced; a rank without data announces none."""

    def train(model: Any, optimizer: Any) -> None:
        acc = wb.Accumulator(model, optimizer, steps=3)
        for index, m in enumerate(acc.over([m for window in mine for m in window])):
            if index % 3 == 0:
                acc.announce({"tokens": sum((m["labels"] != -100).sum() for m in mine[index // 3])})
            acc.backward(wb.Loss.terms({"tokens": loss(model, m)}))

    return compared(train, mine)


def no_gradient_anywhere() -> Errors:
    """A parameter without gradient on any rank keeps none: not even weight decay moves it."""
    model = wrapped("ddp")
    acc = wb.Accumulator(model, torch.optim.AdamW(model.parameters(), weight_decay=0.5), steps=2)
    before = model.module.never.weight.detach().clone()
    for m in acc.over(micros_of("tail", dist.get_rank())[0]):
        acc.backward(loss(model, m))
    return {"update": (model.module.never.weight - before).abs().max().item()}


def decay(named: list[tuple[str, nn.Parameter]]) -> None:
    """A function that is not linear in the gradient, element by element: shards are welcome."""
    for name, parameter in named:
        assert parameter.grad is not None, name
        parameter.grad.add_(parameter, alpha=0.01).tanh_()


class Decayed(Whole):
    """The undivided global batch, with `decay` between backward and clipping."""

    def step(self, batch: Any) -> float:
        value = self.loss(self.model, batch)
        value.backward()
        with torch.no_grad():
            decay([(n, p) for n, p in self.model.named_parameters() if p.grad is not None])
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(value)


def decayed(windows: Windows, clip: float | None, make: Any) -> Whole:
    whole = Decayed(fresh(), make, loss=global_mean)
    for window in windows:
        whole.step(window)
    return whole


def on_gradient(engine: str, own_step: bool) -> Errors:
    """`on_gradient=` in `step`, which rank 0 only joins in the end; or `gradient()` before one."""
    mine = micros_of("tokens" if own_step else "exhausted", dist.get_rank())

    def train(model: Any, optimizer: Any) -> None:
        whole = wb.WholeBatch(
            model,
            None if own_step else optimizer,
            loss=loss,
            micro_batch=2,
            clip_norm=CLIP,
            close=wb.Close(on_gradient=decay),
        )
        for batch in whole.over([joined(window) for window in mine]):
            if own_step:
                whole.gradient(batch)
                optimizer.step()
                optimizer.zero_grad()
            else:
                whole.step(batch)

    return compared(train, mine, engine=engine, undivided=decayed)


def refused_loops() -> dict[str, str]:
    """Loops that ranks cannot share: all ranks get the error."""
    rank = dist.get_rank()

    def attempt(
        steps: tuple[int, ...], items: int, body: Callable[..., Any], engine: str = "ddp"
    ) -> str:
        models = [wrapped(engine) for _ in steps]
        accumulators = [
            wb.Accumulator(model, sgd(model), steps=number)
            for model, number in zip(models, steps, strict=True)
        ]

        def loop() -> None:
            for m in wb.over([micro(i, 2) for i in range(items)], *accumulators):
                body(m, *zip(accumulators, models, strict=True))

        return outcome(loop)

    def in_order(m: Micro, *pairs: Any) -> None:
        for acc, model in pairs:
            acc.backward(loss(model, m))

    def gradient_runs_out() -> None:
        model = wrapped("ddp")
        train = wb.WholeBatch(model, None, loss=loss, micro_batch=2)
        for batch in train.over([joined(window) for window in micros_of("exhausted", rank)]):
            train.gradient(batch)
            model.zero_grad()

    return {
        "steps": attempt((2, 3), 6, in_order),
        "order": attempt((2, 2), 2, lambda m, *pairs: in_order(m, *reversed(pairs))),
        "first": attempt((2, 2), 2 * rank, in_order),
        "announce": attempt((2, 2), 2, lambda m, *pairs: pairs[0][0].announce({"tokens": 1})),
        "no data": attempt((2,), 2 * rank, in_order, "fsdp2"),
        "gradient": outcome(gradient_runs_out),
    }


def report() -> dict[str, Any]:
    rank = dist.get_rank()
    exhausted = micros_of("exhausted", rank)
    off = {
        "unused": looped(micros_of("unused", rank)),
        "adamw unused": looped(micros_of("unused", rank), adamw, CLIP),
        "no data on rank 0": looped([] if rank == 0 else micros_of("tokens", rank)),
        "several accumulators": several_accumulators(exhausted),
        "announced": announced(exhausted),
        "no gradient anywhere": no_gradient_anywhere(),
        "on_gradient ddp": on_gradient("ddp", own_step=False),
        "on_gradient fsdp2": on_gradient("fsdp2", own_step=False),
        "gradient() fsdp2": on_gradient("fsdp2", own_step=True),
    }
    return {"off": off, "refused": refused_loops()}
