"""Runs beside each other: the same data, the right followers, and what the curves say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.errors import OptionError
from wholebatch.tune.learning_curves import (
    Contender,
    LearningCurve,
    Recipe,
    Update,
    learn,
    range_test,
    rival,
)

taken: list[float] = []
used: list[tuple[float, float]] = []


def see(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    group = optimizer.param_groups[0]
    used.append((group["lr"], group["betas"][1]))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.96))
    optimizer.register_step_post_hook(see)
    return model, optimizer


def source() -> Callable[[int], Tensor]:
    numbers = torch.Generator().manual_seed(1)

    def take(samples: int) -> Tensor:
        # One after the other: the data do not depend on how many are taken at once.
        rows = torch.stack([torch.randn(5, generator=numbers) for _ in range(samples)])
        taken.extend(rows[:, 0].tolist())
        return rows

    return take


def loss(model: nn.Module, rows: Tensor) -> wb.Loss:
    error = model(rows[:, :4])[:, 0] - rows[:, :4].sum(1) - rows[:, 4]
    return wb.Loss(error.square().sum(), len(rows))


RECIPE = Recipe(make, loss, source, micro_batch=4, base_batch=16)


def test_both_train_over_the_same_data_with_what_follows_the_batch() -> None:
    taken.clear()
    used.clear()
    seen: list[tuple[str, int, int]] = []

    def watch(*update: Any) -> None:
        seen.append(update)

    whole, alone = rival(RECIPE, samples=64, watch=watch)
    assert taken[:64] == taken[64:]
    assert seen[:4] == [("accumulated", done, 4) for done in range(4)]
    assert seen[4:] == [("micro-batch alone", done, 16) for done in range(16)]
    assert (len(whole.updates), len(alone.updates)) == (4, 16)
    assert used[0] == (0.1, 0.96)
    assert used[-1] == (0.05, pytest.approx(0.96**0.25))  # the same half-life in samples
    assert whole.peak > 0
    assert whole.loss == whole.updates[-1].loss
    with pytest.raises(OptionError, match="is not accumulated: give a smaller micro-batch"):
        rival(Recipe(make, loss, source, 16, 16), samples=64, watch=watch)


def test_a_batch_that_grows_sees_the_data_once() -> None:
    taken.clear()
    found = learn(Contender("auto", 8, largest=32), RECIPE, samples=1600)
    assert sum(found.sizes) == len(taken) >= 1600
    assert found.sizes[0] == 8
    assert found.sizes[-1] == 32
    assert found.loss < found.updates[0].loss


def test_when_a_loss_is_reached() -> None:
    updates = tuple(Update(10 * at, 1.0 / (1 + at), 10.0, 0.1) for at in range(20))
    curve = LearningCurve(Contender("", 10), (10,) * 20, updates, 0)
    assert curve.reaches(0.01) is None
    made, samples = curve.reaches(curve.loss) or (0, 0)
    assert (made, samples) == (20, 190)
    assert curve.reaches(0.3) == (4, 30)  # the mean of 1/3 and 1/4
    assert curve.seconds == pytest.approx(2.0)


def test_the_range_test_finds_where_it_diverges() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    found = range_test(Recipe(make, loss, source, 32, 64), low=1e-4, high=1e3, updates=80)
    # The Hessian is 2: it diverges above a rate of 1.
    assert found.diverges is not None
    assert 1.0 < found.diverges < 5.0
    assert 0.005 < found.steepest < found.lowest < 1.2
    assert math.isclose(found.rates[0], 1e-4)
    with pytest.raises(OptionError, match="must be 0 < low < high"):
        range_test(RECIPE, low=1.0, high=0.1)
    broken = Recipe(make, lambda m, x: wb.Loss(loss(m, x).total * math.nan, 1), source, 32, 64)
    with pytest.raises(wb.errors.NonFiniteError, match=r"update 1: .* loss that is not finite"):
        range_test(broken, low=1e-4, high=1.0)
