"""Losses as users write them that do not add up over micro-batches: each is refused.

`tests/programs` has those that do, and many more that do not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import mlp, pieces, sgd
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
    """A GRU over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(9, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 9)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        made, _ = self.rnn(self.embed(tokens))
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


def in_one_row(model: nn.Module, micro: Batch) -> wb.Loss:
    row = micro["tokens"][micro["mask"].bool()]
    return wb.Loss(
        F.cross_entropy(model(row[None, :-1])[0], row[1:], reduction="sum"), len(row) - 1
    )


REFUSED_ONES: dict[str, tuple[Any, Any, str]] = {
    "losses by rank": (mlp, by_rank, "units must add up"),
    "positives, at least 1": (mlp, detector, "units must add up"),
    "CTC with the targets as units": (
        Recurrent,
        lambda m, b: wb.mean_loss(ctc(m, b), targets(b).sum()),
        "may count something else",
    ),
    "a mean over the longest sequence": (Recurrent, longest, "compares samples"),
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
def test_a_loss_that_does_not_add_up_is_told(
    make: Any, loss: Any, message: str, train: Any
) -> None:
    # A loop has not said that its rows are samples: there it is a warning.
    with pytest.raises((LossError, UnsupportedError, UserWarning), match=message):
        train(make(), loss)


def test_a_count_that_a_split_batch_holds_is_refused() -> None:
    model = nn.Linear(3, 2)
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    batch = {"x": x, "y": y, "count": torch.tensor(8)}

    def loss(net: nn.Module, micro: Any) -> wb.Loss:
        return wb.mean_loss(F.cross_entropy(net(micro["x"]), micro["y"]), micro["count"])

    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=3)
    with pytest.raises(LossError, match="they do not follow the micro-batch"):
        train.step(batch)
