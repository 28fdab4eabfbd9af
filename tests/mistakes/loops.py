"""Correct training in loops of its own: a GAN, averaged weights, layers thawed between windows.

Each function trains twice, divided and undivided, and returns how far the two are apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import wholebatch as wb
from tests.mistakes.kinds import rows, task
from tests.mistakes.task import Batch, Task, flat, sgd

LOOPS: dict[str, Callable[[], float]] = {}


def loop(run: Callable[[], float]) -> Callable[[], float]:
    LOOPS[run.__name__.replace("_", " ")] = run
    return run


def apart(ours: Any, truth: Any, start: Any) -> float:
    """Distance of two modules, relative to how far the second has moved."""
    moved = (flat(truth) - flat(start)).norm()
    return float((flat(ours) - flat(truth)).norm() / moved)


def net(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.LeakyReLU(), nn.Linear(8, out)).double()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.maker, self.critic = net(3, 4), net(4, 1)


def critic_losses(pair: Pair, micro: Batch) -> Tensor:
    real = pair.critic(micro["x"])
    made = pair.critic(pair.maker(micro["noise"]).detach())
    return (F.softplus(-real) + F.softplus(made))[:, 0]


def maker_losses(pair: Pair, micro: Batch) -> Tensor:
    return F.softplus(-pair.critic(pair.maker(micro["noise"])))[:, 0]


def pair_batch() -> Batch:
    torch.manual_seed(6)
    return {"x": rows(17, 4), "noise": rows(17, 3)}


def undivided_pair(updates: int) -> Pair:
    pair, batch = Pair(), pair_batch()
    critic, maker = sgd(pair.critic), sgd(pair.maker)
    for _ in range(updates):
        for losses, optimizer in ((critic_losses, critic), (maker_losses, maker)):
            pair.zero_grad()
            losses(pair, batch).mean().backward()
            optimizer.step()
    return pair


@loop
def a_gan_in_two_whole_batches() -> float:
    pair = Pair()
    steps = [
        wb.WholeBatch(part, sgd(part), loss=lambda _m, b, of=of: of(pair, b), micro_batch=5)
        for part, of in ((pair.critic, critic_losses), (pair.maker, maker_losses))
    ]
    for _ in range(3):
        for one in steps:
            one.step(pair_batch())
    return apart(pair, undivided_pair(3), Pair())


@loop
def an_average_of_weights() -> float:
    made, twin = task("mlp", 2), task("mlp", 2)
    start = copy.deepcopy(made.model)
    ours = AveragedModel(made.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    truth = AveragedModel(twin.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    train = wb.WholeBatch(
        *(made.model, sgd(made.model)),
        loss=lambda m, b: wb.Loss(*made.sum(m, b)),
        micro_batch=4,
        close=wb.Close(ema=ours),
    )
    optimizer = sgd(twin.model)
    for _ in range(3):
        train.step(made.batch)
        undivided(twin, optimizer)
        truth.update_parameters(twin.model)
    return apart(ours, truth, start)


def undivided(made: Task, optimizer: Any, clip: Callable[[Any], Any] | None = None) -> None:
    optimizer.zero_grad()
    made.mean(made.model, made.batch).backward()
    if clip is not None:
        clip(made.model.parameters())
    optimizer.step()


@loop
def layers_thawed_between_windows() -> float:
    """Gradual unfreezing, between two updates."""
    made, twin = task("weighted samples", 4), task("weighted samples", 4)
    start = copy.deepcopy(made.model)
    for one in (made, twin):
        one.model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.5)
    other = torch.optim.SGD(twin.model.parameters(), lr=0.5)
    train = wb.WholeBatch(
        *(made.model, optimizer), loss=lambda m, b: wb.Loss(*made.sum(m, b)), micro_batch=5
    )
    for update in range(3):
        if update == 1:
            made.model[0].requires_grad_(True)
            twin.model[0].requires_grad_(True)
        train.step(made.batch)
        undivided(twin, other)
    return apart(made.model, twin.model, start)
