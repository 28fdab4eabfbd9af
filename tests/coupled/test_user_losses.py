"""Losses as users write them: each gives the update of the undivided batch, or is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import EXACT, mlp, pieces, sgd
from wholebatch.errors import LossError, UnsupportedError

WINDOWS, SIZES = 2, [7, 8, 6, 7]
Batch = dict[str, Tensor]


def window(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    size = sum(SIZES)
    lengths = torch.randint(1, 7, (size,), generator=generator)
    return {
        "x": torch.randn(size, 5, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, 3, (size,), generator=generator),
        "tokens": torch.randint(1, 9, (size, 6), generator=generator),
        "lengths": lengths,
        "mask": (torch.arange(6) < lengths[:, None]).double(),
    }


class Recurrent(nn.Module):
    """A GRU over tokens that may carry its hidden state to the next batch of the same size."""

    def __init__(self, *, carries: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(9, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 9)
        self.carries = carries
        self.hidden: Tensor | None = None
        self.double()

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        given: Any = self.embed(tokens)
        if lengths is not None:
            given = nn.utils.rnn.pack_padded_sequence(
                given, lengths, batch_first=True, enforce_sorted=False
            )
        fits = self.hidden is not None and self.hidden.shape[1] == len(tokens)
        made, last = self.rnn(given, self.hidden if fits else None)
        if self.carries:
            self.hidden = last.detach()
        if lengths is not None:
            made, _ = nn.utils.rnn.pad_packed_sequence(made, batch_first=True, total_length=6)
        logits: Tensor = self.head(made)
        return logits


def losses(model: nn.Module, micro: Batch) -> Tensor:
    return F.cross_entropy(model(micro["x"]), micro["y"], reduction="none")


def ctc(model: nn.Module, micro: Batch) -> Tensor:
    logits = model(micro["tokens"].repeat_interleave(2, 1)).log_softmax(-1).transpose(0, 1)
    size = len(micro["y"])
    return F.ctc_loss(logits, micro["tokens"][:, :3], torch.full((size,), 12), targets(micro))


def targets(micro: Batch) -> Tensor:
    return (micro["lengths"] + 1) // 2


def packed(model: nn.Module, micro: Batch) -> wb.Loss:
    logits = model(micro["tokens"], micro["lengths"]).transpose(1, 2)
    per_token = F.cross_entropy(logits, micro["tokens"], reduction="none")
    return wb.Loss((per_token * micro["mask"]).sum(), micro["mask"].sum())


def dice(model: nn.Module, micro: Batch, dim: int) -> Tensor:
    p, t = model(micro["x"]).softmax(-1), F.one_hot(micro["y"], 3).double()
    return 1 - (2 * (p * t).sum(dim) + 1) / (p.sum(dim) + t.sum(dim) + 1)


def gradient_penalty(model: nn.Module, micro: Batch) -> Tensor:
    x = micro["x"].clone().requires_grad_()
    logits = model(x)
    (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    return F.cross_entropy(logits, micro["y"], reduction="none") + slope.square().sum(1)


def smooth(model: nn.Module, micro: Batch) -> wb.Loss:
    weight = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    loss = F.cross_entropy(model(micro["x"]), micro["y"], weight=weight, label_smoothing=0.1)
    return wb.mean_loss(loss, weight[micro["y"]].sum())


EXACT_ONES: dict[str, tuple[Any, Any]] = {
    "CTC, a mean over samples": (Recurrent, lambda m, b: wb.mean_loss(ctc(m, b), len(b["y"]))),
    "a packed GRU": (Recurrent, packed),
    "Dice of each sample": (mlp, lambda m, b: dice(m, b, 1)),
    "a gradient penalty of each sample": (mlp, gradient_penalty),
    "class weights with smoothed labels": (mlp, smooth),
}


@pytest.mark.parametrize("make, loss", EXACT_ONES.values(), ids=EXACT_ONES)
def test_a_loss_that_adds_up_is_exact(make: Any, loss: Any) -> None:
    model = make()
    whole = copy.deepcopy(model)
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=7)
    optimizer = sgd(whole)
    for number in range(WINDOWS):
        train.step(window(number))
        optimizer.zero_grad()
        made = loss(whole, window(number))
        (made.mean() if isinstance(made, Tensor) else made.total / made.units).backward()
        optimizer.step()
    for ours, its in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.linalg.vector_norm(ours.detach() - its.detach()) <= EXACT * its.detach().norm()


def hardest_triplets(model: nn.Module, micro: Batch) -> Tensor:
    distances = torch.cdist(model(micro["x"]), model(micro["x"]))
    same = micro["y"][:, None] == micro["y"]
    nearest = distances.masked_fill(same, 100.0).min(1).values
    return F.relu((distances * same).max(1).values - nearest + 0.2)


def by_rank(model: nn.Module, micro: Batch) -> wb.Loss:
    ranked = losses(model, micro).sort(descending=True).values
    return wb.Loss((ranked / torch.arange(1, len(ranked) + 1)).sum(), 1)


def detector(model: nn.Module, micro: Batch) -> wb.Loss:
    positive = (micro["y"] == 0) & (micro["lengths"] > 4)
    number = positive.sum().clamp(min=1)
    made = F.binary_cross_entropy_with_logits(
        model(micro["x"])[:, 0], positive.double(), reduction="sum"
    )
    return wb.mean_loss(made / number, number)


def longest(model: nn.Module, micro: Batch) -> Tensor:
    width = int(micro["lengths"].max())
    return (
        (model(micro["tokens"][:, :width]) * micro["mask"][:, :width, None]).mean((1, 2)).square()
    )


def centred_gradient(model: Any, micro: Batch) -> Tensor:
    hidden = model[0](micro["x"])
    hidden.register_hook(lambda gradient: gradient - gradient.mean(0))
    return F.cross_entropy(model[1:](hidden), micro["y"], reduction="none")


def in_one_row(model: nn.Module, micro: Batch) -> wb.Loss:
    row = micro["tokens"][micro["mask"].bool()]
    return wb.Loss(
        F.cross_entropy(model(row[None, :-1])[0], row[1:], reduction="sum"), len(row) - 1
    )


REFUSED_ONES: dict[str, tuple[Any, Any, str]] = {
    "a hidden state that is carried over": (
        lambda: Recurrent(carries=True),
        lambda m, b: m(b["tokens"]).square().mean((1, 2)),
        "hidden .* moves once per micro-batch",
    ),
    "the hardest triplets": (mlp, hardest_triplets, "when another sample changed"),
    "losses by rank": (mlp, by_rank, "units must add up"),
    "positives, at least 1": (mlp, detector, "units must add up"),
    "CTC with the targets as units": (
        Recurrent,
        lambda m, b: wb.mean_loss(ctc(m, b), targets(b).sum()),
        "mean over other units|units may count something else",
    ),
    "a mean over the longest sequence": (Recurrent, longest, "one sample changed|compares samples"),
    "Dice of the batch": (
        mlp,
        lambda m, b: wb.mean_loss(dice(m, b, 0).mean(), len(b["y"])),
        "compares samples",
    ),
    "a hook that centres gradients": (mlp, centred_gradient, "its gradient is not"),
    "sequences in one row": (Recurrent, in_one_row, "units must add up"),
}


def in_whole_batch(model: nn.Module, loss: Any) -> None:
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=7)
    for number in range(WINDOWS):
        train.step(window(number))


def in_run(model: nn.Module, loss: Any) -> None:
    acc = wb.Accumulator(model, sgd(model), steps=len(SIZES))
    for number in range(WINDOWS):
        for micro in pieces(window(number), SIZES):
            acc.run(lambda micro: loss(model, micro), micro)


@pytest.mark.parametrize("train", [in_whole_batch, in_run])
@pytest.mark.parametrize("make, loss, message", REFUSED_ONES.values(), ids=REFUSED_ONES)
def test_a_loss_that_does_not_add_up_is_refused(
    make: Any, loss: Any, message: str, train: Any
) -> None:
    with pytest.raises((LossError, UnsupportedError), match=message):
        train(make(), loss)
