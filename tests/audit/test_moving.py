"""State that a forward moves: refused by its name where it acts, let pass where it is harmless."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import loss, mlp, samples, sgd
from wholebatch.audit.adds_up import check_adds_up
from wholebatch.batch.samples import layout_of


class Net(nn.Module):
    """An MLP whose forward moves something first, and gives an input back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def moved(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(self.moved(x))
        return logits


class RunningMean(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def moved(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


class ActNorm(Net):
    """Set by the first batch: of a micro-batch it would be another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(5))
        self.ready = False

    def moved(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.shift.copy_(x.detach().mean(0))
            self.ready = True
        return x - self.shift


def test_an_initialisation_that_is_made_before_passes() -> None:
    model = ActNorm().double()
    model(samples(20)["x"])
    assert wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4).step(samples(20)).update


@pytest.mark.parametrize("make", [RunningMean, ActNorm])
def test_the_test_leaves_the_model(make: type[nn.Module]) -> None:
    """Its runs begin from the same state, so that no drift hides in their noise."""
    model = make().double()
    before = copy.deepcopy(model.state_dict())
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4)
    with pytest.raises(wb.errors.UnsupportedError, match=make.__name__):
        train.step(samples(10))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Harmless(Net):
    """Counters, caches, logs, and what adds up; nothing of it acts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("seen_again", torch.tensor(0))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("least", torch.tensor(torch.inf))
        self.register_buffer("sums", torch.zeros(5))
        self.samples, self.forwards = 0, 0
        self.logged: list[float] = []
        self.smooth = 0.0
        self.cache: dict[str, Tensor] = {}
        self.positions: Tensor | None = None

    def moved(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.seen_again = self.seen_again + len(x)
        self.calls += 1
        self.least = torch.minimum(self.least, x.min())
        self.sums += x.detach().sum(0)
        self.samples += len(x)
        self.forwards += 1
        self.logged.append(float(x.mean()))
        self.smooth = 0.9 * self.smooth + 0.1 * float(x.mean())
        if self.positions is None:
            self.positions = torch.arange(x.shape[1]).double()
        return x + 0.1 * self.positions

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        self.attention, self.cache["last"] = logits, logits.detach().softmax(-1)
        return logits


def test_counters_caches_and_logs_pass_and_are_put_back() -> None:
    model, plain = Harmless().double(), Harmless().double()
    for one, audit in ((model, True), (plain, False)):
        train = wb.WholeBatch(one, sgd(one), loss=loss, micro_batch=8, audit=audit)
        train.step(samples(20))
    assert model.samples == 20
    assert int(model.seen) == int(model.seen_again) == 20
    assert (model.forwards, float(model.calls)) == (3, 3.0)
    assert model.smooth == plain.smooth
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_test_puts_back_what_is_replaced() -> None:
    model = Harmless().double()
    model(samples(16)["x"])
    seen = model.seen_again
    result = check_adds_up(model, lambda few: loss(model, few), layout_of(samples(8)))
    assert not result.findings
    assert model.seen_again is seen
    assert (int(model.seen_again), int(model.seen), model.samples) == (16, 16, 16)
