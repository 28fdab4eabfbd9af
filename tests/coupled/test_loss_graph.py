"""The graph of a scalar tells a mean given as a sum, and a sum given as a mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import wholebatch as wb
from tests.support import Seen, Whole, mlp, pieces, samples, sgd, summed
from wholebatch.coupled.loss_graph import check_mean, check_sum
from wholebatch.errors import LossError

B, C, T = 6, 4, 5


class Given:
    """A micro-batch of B samples: logits, labels, targets, and tokens of which some are masked."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(1)
        self.z = torch.randn(B, C, generator=made, requires_grad=True)
        self.y = torch.randint(0, C, (B,), generator=made)
        self.t = torch.rand(B, C, generator=made)
        self.tokens = torch.randn(B, T, C, generator=made, requires_grad=True)
        self.labels = torch.randint(0, C, (B, T), generator=made)
        self.labels[0, 2:] = -100
        self.mask = (self.labels >= 0).float()
        self.counted = int(self.mask.sum())
        self.scale = torch.ones((), requires_grad=True)

    def per_sample(self) -> Tensor:
        return F.cross_entropy(self.z, self.y, reduction="none")

    def per_token(self) -> Tensor:
        flat, labels = self.tokens.flatten(0, 1), self.labels.flatten()
        return F.cross_entropy(flat, labels, reduction="none").view(B, T)

    def mean_of_tokens(self) -> Tensor:
        return F.cross_entropy(self.tokens.flatten(0, 1), self.labels.flatten())


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape
        return x.mean()

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        return above.expand(ctx.size) / ctx.size.numel()


def autocast(g: Given) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = g.z @ torch.eye(C, requires_grad=True)
        return F.cross_entropy(logits, g.y) * len(g.y)


Expression = Callable[[Given], Any]

SUMS: dict[str, tuple[Expression, Any]] = {
    "sum": (lambda g: g.per_sample().sum(), B),
    "cross_entropy sum": (lambda g: F.cross_entropy(g.z, g.y, reduction="sum"), B),
    "tokens sum": (lambda g: g.per_token().sum(), lambda g: g.counted),
    "masked sum": (lambda g: (g.per_token() * g.mask).sum(), lambda g: g.mask.sum()),
    "masked mean undone": (
        lambda g: (g.per_token() * g.mask).sum() / g.mask.sum() * g.mask.sum(),
        lambda g: g.mask.sum(),
    ),
    "mean times len": (lambda g: g.per_sample().mean() * len(g.y), B),
    "len times mean": (lambda g: len(g.y) * F.cross_entropy(g.z, g.y), B),
    "mean times tensor": (lambda g: F.cross_entropy(g.z, g.y) * torch.tensor(float(B)), B),
    "mean of tokens times count": (
        lambda g: g.mean_of_tokens() * g.counted,
        lambda g: torch.tensor(g.counted),
    ),
    "weighted mean undone": (lambda g: 0.5 * F.mse_loss(g.z, g.t) * B, B),
    "weight before the units": (lambda g: 0.5 * B * F.mse_loss(g.z, g.t), B),
    "every element": (lambda g: F.mse_loss(g.z, g.t) * g.z.numel(), B),
    "every element in two factors": (lambda g: F.mse_loss(g.z, g.t) * B * C, B),
    "mean over features, summed": (lambda g: (g.z - g.t).square().mean(1).sum(), B),
    "mean over features by hand": (lambda g: (g.z - g.t).square().sum() / C, B),
    "views averaged, samples summed": (
        lambda g: torch.stack([g.per_sample(), g.per_sample()]).mean(0).sum(),
        B,
    ),
    "two terms": (lambda g: g.per_sample().sum() + 0.1 * g.z.square().mean(1).sum(), B),
    "two terms averaged": (
        lambda g: torch.stack([g.per_sample().sum(), g.z.square().sum()]).mean(),
        B,
    ),
    "a loop over samples": (
        lambda g: sum(F.cross_entropy(g.tokens[i], g.labels[i]) for i in range(B)),
        B,
    ),
    "a stack over samples": (
        lambda g: torch.stack([F.cross_entropy(g.tokens[i], g.labels[i]) for i in range(B)]).sum(),
        B,
    ),
    "kl summed": (
        lambda g: F.kl_div(g.z.log_softmax(1), g.t.softmax(1), reduction="sum"),
        B,
    ),
    "kl batchmean undone": (
        lambda g: F.kl_div(g.z.log_softmax(1), g.t.softmax(1), reduction="batchmean") * B,
        B,
    ),
    "one sample, its features averaged": (lambda g: F.mse_loss(g.z[:1], g.t[:1]), 1),
    "one element": (lambda g: F.cross_entropy(g.z[:1], g.y[:1]), 1),
    "everything masked": (
        lambda g: F.cross_entropy(g.z, torch.full((B,), -100)).nan_to_num(),
        0,
    ),
    "a custom function": (lambda g: Custom.apply(g.per_sample()), B),
    "a product with a learned scale": (lambda g: g.scale * g.per_sample().sum(), B),
    "cast": (lambda g: g.per_sample().sum().double(), B),
    "autocast": (autocast, B),
    "a square root": (lambda g: g.z.square().sum().sqrt(), B),
    "weights that add to 1": (lambda g: (g.per_sample() * torch.full((B,), 1 / B)).sum(), B),
    "ctc": (
        lambda g: F.ctc_loss(
            torch.ones(9, 2, C, requires_grad=True).log_softmax(2),
            torch.ones(2, 3, dtype=torch.long),
            torch.tensor([9, 9]),
            torch.tensor([3, 3]),
            reduction="sum",
        ),
        2,
    ),
    "another term of the same units": (lambda g: g.z.square().mean(1).sum(), 0),
}

MEANS: dict[str, tuple[Expression, Any]] = {
    "mean": (lambda g: g.per_sample().mean(), B),
    "cross_entropy": (lambda g: F.cross_entropy(g.z, g.y), B),
    "cross_entropy of one unit": (lambda g: F.cross_entropy(g.z, g.y), 1),
    "cross_entropy with weights": (lambda g: F.cross_entropy(g.z, g.y, weight=torch.ones(C)), B),
    "label smoothing": (lambda g: F.cross_entropy(g.z, g.y, label_smoothing=0.1), B),
    "probabilities": (lambda g: F.cross_entropy(g.z, g.t.softmax(1)), B),
    "tokens": (lambda g: g.mean_of_tokens(), lambda g: torch.tensor(g.counted)),
    "images": (lambda g: F.cross_entropy(g.tokens.transpose(1, 2), g.labels), B),
    "mse": (lambda g: F.mse_loss(g.z, g.t), B),
    "l1": (lambda g: F.l1_loss(g.z, g.t), B),
    "smooth l1": (lambda g: F.smooth_l1_loss(g.z, g.t), B),
    "huber": (lambda g: F.huber_loss(g.z, g.t), B),
    "bce": (lambda g: F.binary_cross_entropy(g.z.sigmoid(), g.t), B),
    "bce with logits": (lambda g: F.binary_cross_entropy_with_logits(g.z, g.t), B),
    "kl batchmean": (
        lambda g: F.kl_div(g.z.log_softmax(1), g.t.softmax(1), reduction="batchmean"),
        B,
    ),
    "soft margin": (lambda g: F.soft_margin_loss(g.z, g.t.sign()), B),
    "multi margin": (lambda g: F.multi_margin_loss(g.z, g.y), B),
    "multilabel margin": (lambda g: F.multilabel_margin_loss(g.z, g.y[:, None].expand(B, C)), B),
    "divided by the number of steps": (lambda g: F.cross_entropy(g.z, g.y) / 8, B),
    "times the number of ranks": (lambda g: F.cross_entropy(g.z, g.y) * 2, B),
    "divided by hand": (lambda g: g.per_sample().sum() / len(g.y), B),
    "masked mean": (lambda g: (g.per_token() * g.mask).sum() / g.mask.sum(), lambda g: g.counted),
    "over both": (lambda g: g.z.square().mean((0, 1)), B),
    "VAE": (lambda g: g.z.square().sum(1).mean(0), B),
    "VAE the other way round": (lambda g: g.z.square().mean(0).sum(), B),
    "half precision": (lambda g: F.cross_entropy(g.z, g.y).bfloat16().float(), B),
    "reshaped": (lambda g: F.cross_entropy(g.z, g.y).view(1).squeeze(), B),
    "one term of two": (lambda g: g.per_sample().sum() + 0.1 * g.z.square().mean(), B),
    "one minus": (lambda g: 1 - g.z.sigmoid().mean(), B),
    "a stack over samples": (
        lambda g: torch.stack([F.cross_entropy(g.tokens[i], g.labels[i]) for i in range(B)]).mean(),
        B,
    ),
    "another term of the same units": (lambda g: F.mse_loss(g.z, g.t), 0),
}

# Given as the mean over these units, and right.
RIGHT_MEANS: dict[str, tuple[Expression, Any]] = {
    **{name: pair for name, pair in MEANS.items() if name != "one term of two"},
    "sum over one unit": (lambda g: F.cross_entropy(g.z, g.y, reduction="sum"), 1),
    "divided sum": (lambda g: F.cross_entropy(g.z, g.y, reduction="sum") / B, B),
    "weighted": (lambda g: (g.per_sample() * torch.full((B,), 1 / B)).sum(), B),
    "per-sample weights": (lambda g: g.per_sample() @ torch.full((B,), 1 / B), B),
    "features summed": (lambda g: g.z.square().sum(1).mean(), B),
}
SUMS_AS_MEANS: dict[str, tuple[Expression, Any]] = {
    "cross_entropy sum": (lambda g: F.cross_entropy(g.z, g.y, reduction="sum"), B),
    "tokens sum": (lambda g: g.per_token().sum(), lambda g: g.counted),
    "per-sample sum": (lambda g: g.per_sample().sum(), B),
    "mse sum": (lambda g: F.mse_loss(g.z, g.t, reduction="sum"), B),
    "VAE": (
        lambda g: (
            F.binary_cross_entropy_with_logits(g.z, g.t, reduction="sum") - 0.5 * g.z.square().sum()
        ),
        B,
    ),
    "cast": (lambda g: F.cross_entropy(g.z, g.y, reduction="sum").double(), B),
}


def made(case: tuple[Expression, Any]) -> tuple[Tensor, Any]:
    given = Given()
    expression, units = case
    return expression(given), units(given) if callable(units) else units


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_passes(name: str) -> None:
    check_sum(*made(SUMS[name]))


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_given_as_a_sum_is_refused(name: str) -> None:
    with pytest.raises(LossError, match="mean"):
        check_sum(*made(MEANS[name]))


@pytest.mark.parametrize("name", RIGHT_MEANS)
def test_a_mean_passes_as_a_mean(name: str) -> None:
    check_mean(*made(RIGHT_MEANS[name]))


@pytest.mark.parametrize("name", SUMS_AS_MEANS)
def test_a_sum_given_as_a_mean_is_refused(name: str) -> None:
    with pytest.raises(LossError, match=r"mean is a sum over .*backward\(total, units="):
        check_mean(*made(SUMS_AS_MEANS[name]))


def test_the_losses_of_the_library_pass() -> None:
    given = Given()
    for loss in (
        wb.cross_entropy(given.z, given.y),
        wb.cross_entropy(given.tokens, given.labels),
        wb.cross_entropy(given.z, given.y, weight=torch.rand(C)),
        wb.mean_loss(given.mean_of_tokens(), given.counted),
        wb.mean_loss(given.mean_of_tokens(), torch.tensor(given.counted)),
        wb.causal_lm(lambda x: given.tokens, (given.tokens, given.labels)),
    ):
        check_sum(loss.total, loss.units)


def test_the_message_says_what_was_given_and_what_to_do() -> None:
    given = Given()
    with pytest.raises(LossError) as error:
        check_sum(F.cross_entropy(given.z, given.y), B)
    assert "total is a mean over 6 elements (NllLossBackward0)" in str(error.value)
    assert "backward(mean=..., units=6)" in str(error.value)
    assert 'reduction="sum"' in str(error.value)
    with pytest.raises(LossError, match="units=1 is right for one sample, and for"):
        check_sum(F.cross_entropy(given.z, given.y), 1)
    with pytest.raises(LossError, match="multiply it by the units of the micro-batch"):
        check_sum(F.cross_entropy(given.z, given.y), 0)
    with pytest.raises(LossError, match=r"a sum divided by 6 \(SumBackward0, DivBackward\)"):
        check_sum(given.per_sample().sum() / B, B)


def test_a_weight_that_may_hold_the_units_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    given = Given()
    check_sum(0.5 * B * F.mse_loss(given.z, given.t), B)
    assert "total is a mean over 24 elements times 3, for units=6" in caplog.text


@pytest.mark.parametrize("sizes", [[4, 4], [7, 1], [1, 5, 2], [3, 3, 1, 1]])
@pytest.mark.parametrize("device_units", [False, True])
def test_means_of_uneven_micro_batches_are_exact(sizes: list[int], device_units: bool) -> None:
    model, batch = mlp(), samples(8)
    whole = Whole(model)
    whole.step(batch)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=len(sizes))
    for micro in pieces(batch, sizes):
        units = torch.tensor(len(micro["y"])) if device_units else len(micro["y"])
        step = acc.backward(mean=F.cross_entropy(model(micro["x"]), micro["y"]), units=units)
    assert step is not None
    assert step.units == 8
    whole.assert_same(model, seen)


def test_an_accumulator_refuses_a_mean_given_as_a_sum() -> None:
    model, batch = mlp(), samples(5)
    acc = wb.Accumulator(model, sgd(model), steps=2)
    mean = F.cross_entropy(model(batch["x"]), batch["y"])
    with pytest.raises(LossError, match="total is a mean over 5 elements"):
        acc.backward(mean, units=5)
    with pytest.raises(LossError, match="total is a mean over 5 elements"):
        wb.Accumulator(model, sgd(model), steps=2).backward(wb.Loss(mean, 5))
    with pytest.raises(LossError, match="mean is a sum over 5 elements"):
        wb.Accumulator(model, sgd(model), steps=2).backward(mean=summed(model, batch), units=5)
    left_out = wb.Accumulator(model, sgd(model), steps=2, audit=False)
    assert left_out.backward(mean, units=5) is None


def test_a_refused_loss_may_be_given_again() -> None:
    model, batch = mlp(), samples(5)
    acc = wb.Accumulator(model, sgd(model), steps=2)
    for _ in range(2):
        with pytest.raises(LossError, match="total is a mean over 5 elements"):
            acc.backward(F.cross_entropy(model(batch["x"]), batch["y"]), units=5)
    assert acc.micro_batches == 0


def test_total_and_mean_are_one_of_two() -> None:
    model, batch = mlp(), samples(3)
    acc = wb.Accumulator(model, sgd(model), steps=2)
    total, mean = summed(model, batch), F.cross_entropy(model(batch["x"]), batch["y"])
    with pytest.raises(LossError, match="give one of the two"):
        acc.backward(total, units=3, mean=mean)
    with pytest.raises(LossError, match=r"backward\(\) without a loss: give total"):
        acc.backward(units=3)
    with pytest.raises(LossError, match=r"backward\(mean=...\) without units="):
        acc.backward(mean=mean)
    with pytest.raises(LossError, match=r"without units=: total is a sum"):
        acc.backward(total)
