"""WholeBatch audits its model: by type when made, by the probe before its first split window."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import EXACT, Whole, distance, loss, samples, sgd
from wholebatch.audit.layers import layers_by_type


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Net(nn.Module):
    """Not one of PyTorch's own types, so the probe looks at it."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inside, self.last = nn.Linear(5, 8), inside, nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.last(self.inside(self.drop(self.first(x))))
        return logits


def test_what_the_test_runs() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    calls = []

    model.register_forward_pre_hook(
        lambda _, args: calls.append((len(args[0]), torch.is_grad_enabled()))
    )
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=10)
    window = [(10, True), (10, True)]
    for number in range(1, 9):
        calls.clear()
        train.step(samples(20))
        if number == 1:  # the whole, both parts, and the second part from the state at the start
            assert calls == [(8, True), (3, True), (5, True), (5, True), *window]
        elif number in (2, 4, 8):  # as many samples as a micro-batch has
            assert calls == [(10, True), (3, True), (7, True), (7, True), *window]
        else:
            assert calls == window


def test_random_numbers_are_held_and_state_of_the_function_is_told() -> None:
    def noisy(model: nn.Module, micro: Any) -> wb.Loss:
        scale = random.random()
        logits = model(micro["x"] + torch.randn_like(micro["x"]))
        return wb.cross_entropy(logits * scale, micro["y"])

    calls = []

    def annealed(model: nn.Module, micro: Any) -> wb.Loss:
        calls.append(1)
        total = loss(model, micro)
        return wb.Loss(total.total * (1 + len(calls) / 10), total.units)

    model = Net(nn.LayerNorm(8)).double()
    train = wb.WholeBatch(model, sgd(model), loss=noisy, micro_batch=4)
    assert train.step(samples(10)).update
    train = wb.WholeBatch(model, sgd(model), loss=annealed, micro_batch=4)
    with pytest.raises(
        wb.errors.UnsupportedError, match="or a variable outside of the model moves"
    ):
        train.step(samples(10))


def test_a_batchnorm_beside_the_model_is_refused_until_it_is_part_of_it() -> None:
    teacher = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double().requires_grad_(False)

    def distilled(model: Any, micro: Any) -> wb.Loss:
        net, other = model if isinstance(model, list) else (model, teacher)
        gap = net(micro["x"]) - other(micro["x"])
        return wb.Loss(gap.square().sum(), gap.numel())

    model = Net(nn.Identity()).double()
    model.drop.p = 0.0
    train = wb.WholeBatch(model, sgd(model), loss=distilled, micro_batch=4)
    with pytest.raises(
        wb.errors.UnsupportedError,
        match=r"it runs on 4 samples, but not on a part .*more than 1 value per channel",
    ):
        train.step(samples(10))
    whole = Whole(model, loss=lambda model, batch: distilled([model, copied], batch).total / 30)
    copied = copy.deepcopy(teacher)
    whole.step(samples(10))
    both = wb.WholeBatch([model, teacher], sgd(model), loss=distilled, micro_batch=4)
    both.step(samples(10))
    whole.assert_same(model)
    assert distance([teacher[1].running_var], [copied[1].running_var]) <= EXACT


def test_spectral_normalisation_is_told(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)).double()
    with caplog.at_level(logging.WARNING, logger="wholebatch"):
        wb.WholeBatch(layer, sgd(layer), loss=loss, micro_batch=4)
    assert "one power iteration in every forward" in caplog.text
    assert [f.kind for f in layers_by_type(layer)] == ["spectral"]
    old = nn.utils.spectral_norm(nn.Linear(5, 3))
    assert [f.kind for f in layers_by_type(old)] == ["spectral"]
