"""State that a forward moves: refused by its name where it acts, let pass where it is harmless."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F

import wholebatch as wb
from tests.support import loss, mlp, samples, sgd
from wholebatch.batch.samples import layout_of
from wholebatch.coupled.adds_up import check_adds_up


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


class SlowMean(Net):
    """Replaced, not changed in place; no buffer; a thousandth at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(5, dtype=torch.float64)

    def moved(self, x: Tensor) -> Tensor:
        self.mean = 0.999 * self.mean + 0.001 * x.detach().mean(0)
        return x - self.mean


class Codebook(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.register_buffer("codes", torch.randn(7, 5))
        self.register_buffer("counts", torch.ones(7))
        self.register_buffer("sums", self.codes.clone())

    def moved(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        out = x + (self.codes[nearest] - x).detach()
        chosen = F.one_hot(nearest, 7).to(x.dtype)
        with torch.no_grad():
            self.counts.mul_(0.99).add_(chosen.sum(0), alpha=0.01)
            self.sums.mul_(0.99).add_(chosen.T @ x, alpha=0.01)
            self.codes.copy_(self.sums / self.counts[:, None])
        return out


class Observed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.quantise = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def moved(self, x: Tensor) -> Tensor:
        out: Tensor = self.quantise(x.float()).double()
        return out


class WarmUp(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def moved(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * min(1.0, self.calls / 1000)


class PowerIteration(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.register_buffer("u", F.normalize(torch.randn(5), dim=0))

    def moved(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.weight.T @ self.u, dim=0)
            self.u = F.normalize(self.weight @ v, dim=0)
        return x @ (self.weight / (self.u @ self.weight @ v))


class Queue(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.queue = deque([torch.randn(5, dtype=torch.float64) for _ in range(4)], maxlen=4)

    def moved(self, x: Tensor) -> Tensor:
        out = x + torch.stack(list(self.queue)).mean(0)
        self.queue.append(x[-1].detach())
        return out


class MomentumEncoder(Net):
    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(5, 5).requires_grad_(False)
        self.fast = nn.Linear(5, 5)

    def moved(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return self.slow(x) + self.fast(x)


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


class EvalMean(Net):
    """Acts on no loss in training, and is still another one in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def moved(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x if self.training else x - self.mean


ACTS = "the loss depends on it: that of the same samples is"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "running mean": (RunningMean, rf"mean \(RunningMean\): moves once per micro-batch.*{ACTS}"),
    "slow mean": (SlowMean, rf"mean \(SlowMean\): .*{ACTS}"),
    "codebook": (Codebook, r"codes \(Codebook\): moves once per micro-batch"),
    "observer": (Observed, rf"quantise.scale \(FakeQuantize\): .*{ACTS}"),
    "warm-up": (WarmUp, rf"calls \(WarmUp\): .*\(0 → 1 in one forward\), and {ACTS}"),
    "power iteration": (PowerIteration, rf"u \(PowerIteration\): .*{ACTS}"),
    "queue": (Queue, rf"queue \(Queue\): .*{ACTS}"),
    "momentum encoder": (MomentumEncoder, r"slow.weight \(Parameter\): a forward changes this"),
    "initialisation": (ActNorm, r"ready \(ActNorm\): .* run that batch through the model before"),
    "for evaluation": (EvalMean, r"mean \(EvalMean\): .* two parts leave it at another value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_acts_is_refused_by_name(name: str) -> None:
    make, says = REFUSED[name]
    for micro_batch, size in [(20, 40), (4, 10)]:
        model = make().double()
        train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=micro_batch)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(wb.errors.UnsupportedError, match=says):
            train.step(samples(size))
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_an_initialisation_that_is_made_before_passes() -> None:
    model = ActNorm().double()
    model(samples(20)["x"])
    assert wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4).step(samples(20)).update


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
    assert (model.forwards, float(model.calls), len(model.logged)) == (3, 3.0, 3)
    assert model.logged == plain.logged
    assert model.smooth == plain.smooth
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_state_of_the_loss_function_itself_is_told() -> None:
    """A baseline in a Python variable: no module holds it, the same samples run again show it."""
    baseline = [0.0]

    def centred(model: Any, micro: Any) -> wb.Loss:
        each = F.cross_entropy(model(micro["x"]), micro["y"], reduction="none")
        baseline[0] = 0.9 * baseline[0] + 0.1 * float(each.detach().mean())
        return wb.Loss((each - baseline[0]).square().sum(), len(each))

    model = mlp()
    train = wb.WholeBatch(model, sgd(model), loss=centred, micro_batch=8)
    with pytest.raises(wb.errors.UnsupportedError, match="something outside of the model changes"):
        train.step(samples(20))


@pytest.mark.parametrize("name", REFUSED)
def test_the_test_leaves_the_model(name: str) -> None:
    """Its runs begin from the same state, so that no drift hides in their noise."""
    model = REFUSED[name][0]().double()
    before = copy.deepcopy(model.state_dict())
    result = check_adds_up(model, lambda few: loss(model, few), layout_of(samples(8)))
    assert result.findings
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_test_puts_back_what_is_replaced() -> None:
    model = Harmless().double()
    model(samples(16)["x"])
    seen, logged = model.seen_again, list(model.logged)
    result = check_adds_up(model, lambda few: loss(model, few), layout_of(samples(8)))
    assert not result.findings
    assert model.seen_again is seen
    assert (int(model.seen_again), int(model.seen), model.samples) == (16, 16, 16)
    assert model.logged == logged
