"""What a loop computes over its micro-batch, around the model, and what only looks like it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import wholebatch as wb
from tests.support import mlp, pieces, samples, sgd
from wholebatch.compile.captured_state import modules_in_sight
from wholebatch.errors import UnsupportedError

Micro = dict[str, Tensor]
Line = Callable[[nn.Module, Micro], tuple[Tensor, int]]
MICROS = pieces(samples(14, features=24), [5, 4, 5])
EVERY = torch.cat([one["x"] for one in MICROS])


def window(line: Line, *, features: int = 24) -> None:
    model = mlp(features)
    acc = wb.Accumulator(model, sgd(model), steps=3)
    for micro in acc.over([dict(one) for one in MICROS]):
        total, units = line(model, micro)
        acc.backward(total, units=units)


def losses(model: nn.Module, micro: Micro, x: Tensor | None = None) -> Tensor:
    logits = model(micro["x"] if x is None else x)
    return F.cross_entropy(logits, micro["y"], reduction="none")


# ---------------------------------------------------------- a BatchNorm that is not in the model


def teacher() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 3), nn.BatchNorm1d(3)).double()


def by_teacher(of: nn.Module) -> Line:
    def line(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
        with torch.no_grad():
            goal = of(micro["x"])
        return F.mse_loss(model(micro["x"]), goal, reduction="sum"), len(goal)

    return line


def test_a_teachers_batchnorm_in_training_mode_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"runs a BatchNorm1d in training .*teacher\.eval"):
        window(by_teacher(teacher()))
    window(by_teacher(teacher().eval()))


def test_a_network_with_batchnorm_in_front_of_the_model_is_refused() -> None:
    front = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24)).double()

    def line(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
        each = losses(model, micro, front(micro["x"]))
        return each.sum(), len(each)

    with pytest.raises(UnsupportedError, match="runs a BatchNorm1d in training mode"):
        window(line)


def test_batchnorms_that_have_no_part_in_the_loss() -> None:
    """A model that is trained beside, and one that ran before the first micro-batch."""
    beside, before = teacher(), teacher()
    optimizer = sgd(beside)

    def line(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
        beside(micro["x"]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        each = losses(model, micro)
        return each.sum(), len(each)

    before(MICROS[0]["x"])
    window(line)


# ---------------------------------------------------------- normalised over the micro-batch


def standardised_inputs(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
    x = micro["x"]
    return losses(model, micro, (x - x.mean(0)) / (x.std(0) + 1e-6)).sum(), len(x)


def inputs_standardised_as_a_whole(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
    x = micro["x"]
    return losses(model, micro, (x - x.mean()) / x.std()).sum(), len(x)


def standardised_targets(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
    goal = micro["x"][:, :3]
    goal = (goal - goal.mean(0)) / goal.std(0)
    return F.mse_loss(model(micro["x"]), goal, reduction="sum"), len(goal)


def mixed_inputs(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
    micro["x"].mul_(0.7).add_(0.3 * micro["x"].flip(0))  # in place, as timm does
    return losses(model, micro).sum(), len(micro["x"])


@pytest.mark.parametrize(
    "line, message",
    [
        (standardised_inputs, "an input of the model has mean 0 and deviation 1"),
        (inputs_standardised_as_a_whole, "an input of the model has mean 0 and deviation 1"),
        (standardised_targets, "a target in this loss has mean 0 and deviation 1"),
        (mixed_inputs, "an input of the model depends on the data of other samples"),
    ],
)
def test_what_is_done_over_a_micro_batch_is_told(
    line: Line, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    window(line)
    assert message in caplog.text
    assert "do it over the whole batch" in caplog.text


def by_length(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
    """A mean over tokens, by the mean of each sequence and its share of all of them."""
    each, length = losses(model, micro), torch.arange(2, 2 + len(micro["x"]))
    return (each * (length / length.sum())).sum() * int(length.sum()), int(length.sum())


def shuffled(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
    order = torch.randperm(len(micro["x"]))
    return F.cross_entropy(model(micro["x"][order]), micro["y"][order], reduction="sum"), len(order)


def normalised_in_each_sample(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
    x = micro["x"]
    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True, correction=0)
    return losses(model, micro, x).sum(), len(x)


def normalised_by_the_dataset(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
    x = (micro["x"] - EVERY.mean(0)) / EVERY.std(0)
    return losses(model, micro, x).sum(), len(x)


def corners(model: nn.Module, micro: Micro) -> tuple[Tensor, int]:
    x = torch.tensor([1.0, -1.0]).double().repeat(len(micro["x"]), 12)[:, :24]
    x = x * torch.tensor([1.0, -1.0]).repeat(3)[: len(x), None]
    return losses(model, micro, x).sum(), len(x)


@pytest.mark.parametrize(
    "line",
    [by_length, shuffled, normalised_in_each_sample, normalised_by_the_dataset, corners],
)
def test_what_only_looks_like_it_is_not(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    window(line)
    assert not caplog.records


@pytest.mark.parametrize("driven", [True, False])
def test_a_model_that_is_called_once_per_sample(driven: bool) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    micros: Any = [[torch.randn(2 + i % 3, 5).double() for i in range(n)] for n in (3, 5)]
    for micro in acc.over(micros) if driven else micros:
        rows = torch.stack([model(x).mean(0) for x in micro])
        acc.backward(
            F.cross_entropy(rows, torch.ones(len(rows)).long(), reduction="sum"), len(rows)
        )
    assert acc.updates == 1


class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.GRU(3, 4, batch_first=True), None

    def forward(self, x: Tensor) -> Tensor:
        made, state = self.layer(x, self.state)
        self.state = state.detach()
        return made  # type: ignore[no-any-return]


def test_a_hidden_state_that_a_model_carries_over_is_refused() -> None:
    model = Carried().double()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    made = model(torch.randn(5, 7, 3).double())
    with pytest.raises(UnsupportedError, match=r"state .*moves once per micro-batch"):
        acc.backward(made.square().sum(), units=35)


# ---------------------------------------------------------- [time, samples] or [samples, time]


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer: nn.Module = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
        if kind == "lstm":
            self.layer = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Any = self.layer(x)
        return made if isinstance(made, Tensor) else made[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_a_layer_that_reads_samples_as_time(kind: str) -> None:
    """Refused where the loss takes the mean over time, or has a unit for each sample."""
    losses_of: list[Callable[[Tensor], tuple[Tensor, int]]] = [
        lambda z: (z.mean(1).square().sum(), len(z)),
        lambda z: (z.square().mean((1, 2)).sum(), len(z)),
        lambda z: (z.mean(1).square().sum(), 4 * len(z)),
    ]
    for loss in losses_of:
        model = Recurrent(kind).double()
        acc = wb.Accumulator(model, sgd(model), steps=3)
        total, units = loss(model(torch.randn(5, 7, 4).double()))
        with pytest.raises(UnsupportedError, match=r"layer.*batch_first=True"):
            acc.backward(total, units=units)
    acc = wb.Accumulator(model, sgd(model), steps=3)
    acc.backward(model(torch.randn(7, 5, 4).double()).mean(0).square().sum(), units=5)
    acc.discard()


def test_a_loader_tells_which_dimension_is_the_samples() -> None:
    for turned in (False, True):
        model = Recurrent("lstm").double()
        acc = wb.Accumulator(model, sgd(model), steps=3)
        loader: Any = DataLoader(torch.randn(12, 7, 4).double(), batch_size=4)  # type: ignore[arg-type]

        def train(acc: wb.Accumulator, model: nn.Module, loader: Any, turned: bool) -> None:
            for x in acc.over(loader):
                given = x.transpose(0, 1) if turned else x
                acc.backward(model(given).square().sum(), units=given[..., 0].numel())

        if turned:
            train(acc, model, loader, turned)
            continue
        with pytest.raises(UnsupportedError, match=r"layer.*batch_first=True"):
            train(acc, model, loader, turned)


def first_micro_batch() -> tuple[bool, bool]:
    """No assert in here: pytest would put `locals` into it, and such functions are left alone."""
    model, other = mlp(), teacher()
    acc = wb.Accumulator(model, sgd(model), steps=3)
    logits = model(samples(4)["x"])
    acc.backward(logits.square().sum(), units=4)
    kept = weakref.ref(logits)
    del logits
    acc.discard()
    found = modules_in_sight()
    return kept() is None, model in found and other in found


def test_nothing_of_the_loop_is_kept() -> None:
    """Reading a function's variables makes a copy of them, which would keep the logits."""
    assert first_micro_batch() == (True, True)
