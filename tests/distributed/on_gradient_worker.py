"""Run under torchrun: `on_gradient=` and `gradient()` against one process on the global batch."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import wholebatch as wb
from tests.distributed.exact_worker import joined, micros_of, wrapped
from tests.distributed.problem import SeenFull, errors, everyones, full, global_mean, loss
from tests.distributed.problem import fresh as fresh_model
from tests.support import Whole, distance, sgd
from wholebatch.errors import RankError

CLIP = 0.05


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


def undivided(mine: list[Any]) -> Whole:
    whole = Decayed(fresh_model(), sgd, loss=global_mean)
    for window in everyones(mine):
        whole.step(window)
    return whole


def stepped(engine: str, *, case: str) -> dict[str, float]:
    """`on_gradient` in the library's own step; with "exhausted" one rank only joins."""
    model = wrapped(engine)
    optimizer = sgd(model)
    seen = SeenFull(model, optimizer)
    mine = micros_of(case, dist.get_rank())
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=loss,
        micro_batch=2,
        clip_norm=CLIP,
        close=wb.Close(on_gradient=decay),
    )
    for batch in train.over([joined(window) for window in mine]):
        train.step(batch)
    return errors(model, seen, undivided(mine))


def left(engine: str) -> dict[str, float]:
    """`gradient()` and an optimizer that the library does not know."""
    model = wrapped(engine)
    optimizer = sgd(model)
    seen = SeenFull(model, optimizer)
    mine = micros_of("tokens", dist.get_rank())
    train = wb.WholeBatch(
        model, None, loss=loss, micro_batch=2, clip_norm=CLIP, close=wb.Close(on_gradient=decay)
    )
    for window in mine:
        train.gradient(joined(window))
        optimizer.step()
        optimizer.zero_grad()
    return errors(model, seen, undivided(mine))


def noise_of_ones_own() -> str:
    """Each rank draws its own noise: their models would drift apart."""
    model = wrapped("ddp")
    start = [full(p.detach()).clone() for p in model.parameters()]
    generator = torch.Generator().manual_seed(dist.get_rank())

    def noise(named: list[tuple[str, nn.Parameter]]) -> None:
        for _, parameter in named:
            assert parameter.grad is not None
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad.add_(drawn, alpha=1e-3)

    train = wb.WholeBatch(
        model, sgd(model), loss=loss, micro_batch=2, close=wb.Close(on_gradient=noise)
    )
    try:
        train.step(joined(micros_of("tokens", dist.get_rank())[0]))
    except RankError as error:
        assert distance([full(p) for p in model.parameters()], start) == 0.0
        return str(error)
    return "not refused"


def other_optimizer(what: str) -> str:
    """Each rank has its own rate (a scheduler of its own loss), or order (a set of names)."""
    model, rank = wrapped("ddp"), dist.get_rank()
    parameters = list(model.parameters())
    if what == "order" and rank:
        parameters.reverse()
    optimizer = torch.optim.SGD(parameters, lr=0.1 + rank * (what == "rate"))
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=2)
    try:
        train.step(joined(micros_of("tokens", dist.get_rank())[0]))
    except RankError as error:
        return str(error)
    return "not refused"


def runs_out() -> str:
    """After `gradient()` a rank cannot join: its loop would make no step."""
    model = wrapped("ddp")
    train = wb.WholeBatch(model, None, loss=loss, micro_batch=2)
    mine = micros_of("exhausted", dist.get_rank())
    try:
        for batch in train.over([joined(window) for window in mine]):
            train.gradient(batch)
            model.zero_grad()
    except RankError as error:
        return str(error)
    return "not refused"


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        f"{engine} {name}": run(engine)
        for engine in ("ddp", "fsdp2")
        for name, run in {
            "stepped": lambda engine: stepped(engine, case="tokens"),
            "joined": lambda engine: stepped(engine, case="exhausted"),
            "left": left,
        }.items()
    }
    found["noise"], found["runs out"] = noise_of_ones_own(), runs_out()
    found["rate"], found["order"] = other_optimizer("rate"), other_optimizer("order")
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump({"ranks": gathered}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
