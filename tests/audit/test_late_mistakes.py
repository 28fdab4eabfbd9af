"""Mistakes that the first window does not show are refused at window 2, 4 or 8."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import mean, mlp, pieces, sgd
from wholebatch.errors import LossError, UnsupportedError

MICRO, STEPS = 8, 4
Batch = dict[str, Tensor]
LossOf = Callable[[nn.Module, Batch], wb.Loss]


def window(number: int) -> Batch:
    """Return the batch of a window: only those after the first have padding and class 2."""
    generator = torch.Generator().manual_seed(number)
    size = MICRO * STEPS
    y = torch.randint(0, 2, (size,), generator=generator)
    mask = torch.ones(size, 4, dtype=torch.float64)
    if number > 1:
        y[torch.rand(size, generator=generator) < 0.3] = 2
        lengths = torch.randint(1, 5, (size, 1), generator=generator)
        mask = (torch.arange(4) < lengths).double()
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    x[:, 0] += 3.0 * y  # so that the loss falls
    return {"x": x, "y": y, "mask": mask}


def token_mean(model: nn.Module, micro: Batch) -> wb.Loss:
    losses = F.cross_entropy(model(micro["x"]), micro["y"], reduction="none")[:, None]
    mask = micro["mask"]
    return wb.mean_loss((losses * mask).sum() / mask.sum(), len(micro["y"]))


def rare_class(model: nn.Module, micro: Batch) -> wb.Loss:
    loss = mean(model, micro)
    rare = micro["y"] == 2
    if bool(rare.any()):
        loss = loss + 0.1 * model(micro["x"])[rare].square().mean()
    return wb.mean_loss(loss, len(micro["y"]))


def flooding(model: nn.Module, micro: Batch) -> wb.Loss:
    loss = mean(model, micro)
    return wb.mean_loss((loss - 1.09).abs() + 1.09, len(micro["y"]))


class Teacher:
    """A copy of the model that follows it by every micro-batch."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None

    def __call__(self, model: nn.Module, micro: Batch) -> wb.Loss:
        student = getattr(model, "module", model)
        if self.model is None:
            self.model = copy.deepcopy(student).requires_grad_(False)
        with torch.no_grad():
            for ours, its in zip(self.model.parameters(), student.parameters(), strict=True):
                ours.lerp_(its, 0.1)
            target = self.model(micro["x"]).softmax(-1)
        losses = F.cross_entropy(model(micro["x"]), target, reduction="sum")
        own = F.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")
        return wb.Loss(losses + own, len(micro["y"]))


MISTAKES: dict[str, tuple[Callable[[], LossOf], str]] = {
    "a token mean with the samples as units": (
        lambda: token_mean,
        "may count something else|units of this loss do not follow",
    ),
    "a term of a rare class": (
        lambda: rare_class,
        "compares samples|may count something else|units of this loss do not follow",
    ),
    "flooding": (
        lambda: flooding,
        "compares samples|may count something else|units of this loss do not follow",
    ),
    "a teacher moved by every micro-batch": (
        Teacher,
        "state moves with every call",
    ),
}


def in_whole_batch(loss: LossOf, seen: list[int]) -> None:
    model = mlp()
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=MICRO)
    for number in range(1, 9):
        seen.append(number)
        train.step(window(number))


def in_run(loss: LossOf, seen: list[int]) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=STEPS)
    of_micro = partial(loss, model)
    for number in range(1, 9):
        seen.append(number)
        for micro in pieces(window(number), [MICRO] * STEPS):
            acc.run(of_micro, micro)


ENTRY_POINTS = {"WholeBatch": in_whole_batch, "run": in_run}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("run", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_a_late_mistake_is_refused(run: Any, mistake: str) -> None:
    make, message = MISTAKES[mistake]
    seen: list[int] = []
    with pytest.raises((LossError, UnsupportedError, UserWarning), match=message):
        run(make(), seen)
    assert seen[-1] in (2, 4, 8)
