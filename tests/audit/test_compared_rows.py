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
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.support import EXACT, Seen, distance, grouped, mlp, pieces, samples, sgd, summed
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


def batch_hard_triplet(model: nn.Module) -> tuple[Tensor, int]:
    z, y = model(data(12)), torch.arange(12) % 3
    apart = (z[:, None] - z[None]).square().sum(2)
    same = y[:, None] == y
    worst = apart.masked_fill(~same, -1.0).amax(1)
    best = apart.masked_fill(same, float("inf")).amin(1)
    return F.relu(worst - best + 1.0).sum(), 12


COUPLED = [
    similarities,
    simclr,
    batch_hard_triplet,
]


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


@pytest.mark.parametrize("loss", COUPLED)
def test_a_window_that_is_the_whole_batch_may_compare(loss: Callable[..., Any]) -> None:
    model = mlp()
    acc = accumulator(model, steps=1)
    total, units = loss(model)
    assert acc.backward(total, units=units) is not None


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


def pairs_in_any_order(model: nn.Module) -> tuple[Tensor, int]:
    scores = model(data())[:, 0]
    return F.softplus(scores[[0, 5, 2, 3]] - scores[[7, 1, 6, 4]]).sum(), 4


def packed_pairs(model: nn.Module) -> tuple[Tensor, int]:
    lengths = [3, 1, 4, 2, 2, 5]  # three chosen answers, and three rejected
    scores = torch.stack([one.sum() for one in model(data(17))[:, 0].split(lengths)])
    return F.softplus(scores[3:] - scores[:3]).sum(), 3


def lists_with_as_many_units_as_documents(model: nn.Module) -> tuple[Tensor, int]:
    lists = model(data(10))[:, 0].split([2, 7, 1])
    return sum(len(one) * (one.logsumexp(0) - one[0]) for one in lists), 10  # type: ignore[return-value]


def test_groups_that_may_be_whole_are_warned_of_once() -> None:
    model = mlp()
    acc = accumulator(model)
    total, units = lists_with_as_many_units_as_documents(model)
    with pytest.warns(UserWarning, match="links 7 of the 10 rows"):
        acc.backward(total, units=units)
    total, units = lists_with_as_many_units_as_documents(model)
    acc.backward(total, units=units)  # It is said once.


# ---------------------------------------------------------- losses that do not


def dpo(model: nn.Module) -> tuple[Tensor, int]:
    chosen, rejected = model(data(16)).log_softmax(1)[:, 0].chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).sum(), 8


def dpo_in_two_forwards(model: nn.Module) -> tuple[Tensor, int]:
    return F.softplus(model(data(seed=1)) - model(data(seed=2))).sum(), 8


def language_model(model: nn.Module) -> tuple[Tensor, int]:
    logits = model(torch.randn(4, 7, 5).double())
    return F.cross_entropy(logits.flatten(0, 1), torch.ones(28).long(), reduction="sum"), 28


def crf_with_time_first(model: nn.Module) -> tuple[Tensor, int]:
    scores = model(torch.randn(9, 4, 5).double())  # [time, samples, labels]
    alpha = scores[0]
    for step in scores[1:]:
        alpha = (alpha[:, :, None] + step[:, None]).logsumexp(1)
    return (alpha.logsumexp(1) - scores[:, :, 0].sum(0)).sum(), 4


def lists_of_different_lengths(model: nn.Module) -> tuple[Tensor, int]:
    scores = model(data(10))[:, 0]
    lists = scores.split([2, 7, 1])
    return sum(one.logsumexp(0) - one[0] for one in lists), 3  # type: ignore[return-value]


def one_list(model: nn.Module) -> tuple[Tensor, int]:
    scores = model(data(10))[:, 0]
    return scores.logsumexp(0) - scores[0], 1


def gan(model: nn.Module) -> tuple[Tensor, int]:
    real, fake = model(data(seed=1))[:, 0], model(data(seed=2))[:, 0]
    return F.softplus(-real).sum() + F.softplus(fake).sum(), 8


def gradient_penalty(model: nn.Module) -> tuple[Tensor, int]:
    x = data().requires_grad_()
    score = model(x)[:, 0]
    [slope] = torch.autograd.grad(score.sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().sum() + score.sum(), 8


def weighted(model: nn.Module) -> tuple[Tensor, Tensor]:
    weights = torch.rand(8).double()
    losses = F.cross_entropy(model(data()), torch.arange(8) % 3, reduction="none")
    return (losses * weights).sum(), weights.sum()


def two_outputs(model: nn.Module) -> tuple[Tensor, int]:
    z = model(data())
    return z[:, 0].square().sum() + F.cross_entropy(z, torch.arange(8) % 3, reduction="sum"), 8


def linear(model: nn.Module) -> tuple[Tensor, int]:
    return model(data()).sum(), 8


def queries_and_documents(model: nn.Module) -> tuple[Tensor, int]:
    queries, documents = model(data(4)), model(data(12)).view(4, 3, 3)
    scores = torch.einsum("qd,qnd->qn", queries, documents)
    return F.cross_entropy(scores, torch.zeros(4).long(), reduction="sum"), 4


def outside_the_models(model: nn.Module) -> tuple[Tensor, int]:
    weight = next(model.parameters())
    return (data() @ weight.T).square().sum(), 8


APART = [
    dpo,
    dpo_in_two_forwards,
    language_model,
    crf_with_time_first,
    lists_of_different_lengths,
    one_list,
    bags,
    pairs_in_any_order,
    packed_pairs,
    gan,
    gradient_penalty,
    weighted,
    two_outputs,
    linear,
    queries_and_documents,
    outside_the_models,
]


@pytest.mark.parametrize("loss", APART)
def test_no_false_alarm(loss: Callable[..., Any]) -> None:
    model = mlp()
    acc = accumulator(model)
    total, units = loss(model)
    assert acc.backward(total, units=units) is None
    acc.flush()


def test_a_model_with_one_number_per_sample() -> None:
    """An output of one dimension, as a regression has."""

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[:, 0]

    model = Regression()
    whole = copy.deepcopy(model)
    acc = accumulator(model, steps=2)
    for x in data(8).split([3, 5]):
        acc.backward((model(x) - 1).square().sum(), units=len(x))
    (whole(data(8)) - 1).square().mean().backward()
    sgd(whole).step()
    assert distance(model.parameters(), whole.parameters()) < EXACT
    acc = accumulator(model, audit=True)
    with pytest.warns(UserWarning, match=COMPARES):
        acc.backward(model(data()).sum().square(), units=8)


def test_recurrent_states_are_not_samples() -> None:
    model = nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True).double()
    acc = accumulator(model)
    _, (h, _) = model(torch.randn(4, 6, 5).double())  # h: [layers and directions, samples, ...]
    z = torch.cat(list(h), dim=1)
    assert acc.backward(F.cross_entropy(z, torch.arange(4), reduction="sum"), units=4) is None


def test_outputs_in_containers_are_seen() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, *, x: Tensor) -> dict[str, Any]:
            z = self.inner(x)
            return {"loss": z.sum(), "states": (z, None)}

    model = Named()
    acc = accumulator(model)
    z = model(x=data())["states"][0]
    with pytest.warns(UserWarning, match=COMPARES):
        acc.backward(z.sum(0).square().sum(), units=8)


def test_a_method_of_the_model_is_seen_by_its_parts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = mlp(), mlp()

    model = Two()
    acc = accumulator(model)
    logits = model.image(data(seed=1)) @ model.text(data(seed=2)).T
    with pytest.warns(UserWarning, match=COMPARES):
        acc.backward(F.cross_entropy(logits, torch.arange(8), reduction="sum"), units=8)


# ---------------------------------------------------------- leaving no trace


def trained(audit: bool, loss: Callable[[nn.Module, Any], Tensor]) -> tuple[nn.Module, Seen]:
    torch.manual_seed(5)
    model = nn.Sequential(mlp(), nn.Dropout(0.3)).float()
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=2, audit=audit)
    for micro in pieces(samples(8, dtype=torch.float32), [3, 1, 2, 2]):
        acc.backward(loss(model, micro), units=len(micro["y"]))
    return model, seen


def checkpointed(model: nn.Module, micro: Any) -> Tensor:
    z = checkpoint(model, micro["x"], use_reentrant=False)
    return F.cross_entropy(z, micro["y"], reduction="sum")


@pytest.mark.parametrize("loss", [summed, checkpointed])
def test_the_checks_change_no_bit(loss: Callable[[nn.Module, Any], Tensor]) -> None:
    (model, seen), (plain, without) = trained(True, loss), trained(False, loss)
    for ours, theirs in zip(seen.gradients, without.gradients, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_a_window_that_grows_is_checked_then() -> None:
    model = mlp()
    acc = accumulator(model, steps={0: 1, 1: 2})
    assert acc.backward(*similarities(model)) is not None
    total, units = similarities(model)
    with pytest.warns(UserWarning, match=COMPARES):
        acc.backward(total, units=units)


def test_an_output_keeps_its_gradient_as_it_is() -> None:
    model = mlp()
    acc = accumulator(model)
    z = model(data())
    z.retain_grad()
    acc.backward(z.square().sum(), units=8)
    assert torch.equal(z.grad, 2 * z * acc._ledger.current.seed)


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
