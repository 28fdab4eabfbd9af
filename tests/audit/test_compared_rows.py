"""Losses that compare samples, found in a loop whose forwards are not ours."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import grouped, mlp, sgd
from wholebatch.errors import LossError, UnsupportedError

COMPARES = "this loss links [0-9]+ of the [0-9]+ rows"


def data(rows: int = 8, *, seed: int = 3) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed)).double()


def accumulator(*models: nn.Module, **options: Any) -> wb.Accumulator:
    parameters = [p for model in models for p in model.parameters()]
    options = {"steps": 4, **options}
    return wb.Accumulator(list(models), torch.optim.SGD(parameters, lr=0.1), **grouped(options))


# ---------------------------------------------------------- losses that compare samples


def similarities(model: nn.Module) -> tuple[Tensor, int]:
    z = model(data())
    return F.cross_entropy(z @ z.T, torch.arange(8), reduction="sum"), 8


def simclr(model: nn.Module) -> tuple[Tensor, int]:
    z = F.normalize(torch.cat([model(data(seed=1)), model(data(seed=2))]), dim=1)
    logits = (z @ z.T / 0.5).masked_fill(torch.eye(16, dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(16).roll(8), reduction="sum"), 8


COUPLED = [similarities, simclr]


@pytest.mark.parametrize("loss", COUPLED)
def test_a_loss_that_compares_samples_is_told(loss: Callable[..., Any]) -> None:
    model = mlp()
    acc = accumulator(model)
    total, units = loss(model)
    with pytest.warns(UserWarning, match=COMPARES):
        acc.backward(total, units=units)
    assert acc.micro_batches == 1
    acc.discard()
    left_out = accumulator(model, audit=False)
    total, units = loss(model)
    assert left_out.backward(total, units=units) is None


def test_a_loss_of_the_library_that_compares_is_refused() -> None:
    model = mlp()
    acc = accumulator(model)
    for _ in range(2):
        with pytest.raises(LossError, match="compares all samples with each other"):
            acc.backward(wb.losses.info_nce(model(data(seed=1)), model(data(seed=2))))
    whole = accumulator(model, steps=1)
    assert whole.backward(wb.losses.info_nce(model(data(seed=1)), model(data(seed=2)))) is not None
    accumulator(model, audit=False).backward(
        wb.losses.clip_loss(model(data()), model(data(seed=2)))
    )


def bags(model: nn.Module) -> tuple[Tensor, int]:
    of = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    pooled = torch.zeros(4, 3).double().index_add(0, of, model(data()))
    return F.cross_entropy(pooled, torch.arange(4) % 3, reduction="sum"), 4


def packed_pairs(model: nn.Module) -> tuple[Tensor, int]:
    lengths = [3, 1, 4, 2, 2, 5]  # three chosen answers, and three rejected
    scores = torch.stack([one.sum() for one in model(data(17))[:, 0].split(lengths)])
    return F.softplus(scores[3:] - scores[:3]).sum(), 3


# ---------------------------------------------------------- losses that do not


def crf_with_time_first(model: nn.Module) -> tuple[Tensor, int]:
    scores = model(torch.randn(9, 4, 5).double())  # [time, samples, labels]
    alpha = scores[0]
    for step in scores[1:]:
        alpha = (alpha[:, :, None] + step[:, None]).logsumexp(1)
    return (alpha.logsumexp(1) - scores[:, :, 0].sum(0)).sum(), 4


def gan(model: nn.Module) -> tuple[Tensor, int]:
    real, fake = model(data(seed=1))[:, 0], model(data(seed=2))[:, 0]
    return F.softplus(-real).sum() + F.softplus(fake).sum(), 8


def gradient_penalty(model: nn.Module) -> tuple[Tensor, int]:
    x = data().requires_grad_()
    score = model(x)[:, 0]
    [slope] = torch.autograd.grad(score.sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().sum() + score.sum(), 8


APART = [crf_with_time_first, bags, packed_pairs, gan, gradient_penalty]


@pytest.mark.parametrize("loss", APART)
def test_no_false_alarm(loss: Callable[..., Any]) -> None:
    model = mlp()
    acc = accumulator(model)
    total, units = loss(model)
    assert acc.backward(total, units=units) is None
    acc.flush()


def test_recurrent_states_are_not_samples() -> None:
    model = nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True).double()
    acc = accumulator(model)
    _, (h, _) = model(torch.randn(4, 6, 5).double())  # h: [layers and directions, samples, ...]
    z = torch.cat(list(h), dim=1)
    assert acc.backward(F.cross_entropy(z, torch.arange(4), reduction="sum"), units=4) is None


# ---------------------------------------------------------- leaving no trace


def test_copies_and_pickles_of_the_model_have_no_part_in_it() -> None:
    model = mlp()
    acc = accumulator(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(data()).sum().backward()
    assert acc.micro_batches == 0


def test_functions_that_may_not_run_twice_are_left_alone() -> None:
    ran: list[float] = []

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sum(0).square().sum()

        @staticmethod
        def backward(ctx: Any, above: Tensor) -> Tensor:
            ran.append(1.0)
            return above * 2 * ctx.saved_tensors[0].sum(0).expand(8, 3)

    model = mlp()
    assert accumulator(model).backward(Once.apply(model(data())), units=8) is None
    assert len(ran) == 1


class _Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 3, scale_grad_by_freq=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x)  # type: ignore[no-any-return]


def test_gradients_that_are_divided_by_the_rows_of_a_micro_batch() -> None:
    model, x = _Rows(), torch.tensor([0, 1, 2, 3, 3, 3])
    acc = wb.Accumulator(model, sgd(model), steps=2)
    with pytest.raises(UnsupportedError, match="scale_grad_by_freq"):
        acc.backward(model(x).square().sum(), units=6)
    train = wb.WholeBatch(
        model,
        sgd(model),
        loss=lambda model, x: wb.Loss(model(x).square().sum(), len(x)),
        micro_batch=2,
    )
    with pytest.raises(UnsupportedError, match="scale_grad_by_freq"):
        train.step(x)


def test_a_batchnorm_that_was_allowed_between_two_outputs_is_no_comparison() -> None:
    """A PostNet: the second output is made of the first, and the loss takes both."""

    class Speaker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mel, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mel = self.mel(x)
            return mel, self.norm(mel) + mel

    model = Speaker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = wb.Accumulator(model, optimizer, steps=2, batchnorm="allow")
    for x in torch.randn(2, 4, 4):
        mel, post = model(x)
        losses = mel.square() + post.square() + post.pow(3)
        step = acc.backward(mean=losses.mean(), units=len(x))
    assert step is not None
    acc = wb.Accumulator(model, optimizer, steps=2, batchnorm="allow")
    mel, post = model(x)
    with pytest.warns(UserWarning, match=COMPARES):
        acc.backward(mean=(post @ post.T).logsumexp(1).mean() + mel.square().mean(), units=len(x))
