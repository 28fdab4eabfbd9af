"""The list of checks: empty, with one more law, and as docs/laws.md shows it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from scripts.laws_table import PAGE, parts_of, with_table
from tests.support import Seen
from wholebatch.audit.check import Answer, Check, MicroBatch, Refused, Warned
from wholebatch.audit.loop_checks import LAWS, LoopChecks
from wholebatch.errors import LossError

SIZES = (3, 1, 4, 2, 5)


def trained(checks: Sequence[Check] | None, windows: int = 3) -> tuple[Any, Any, wb.Accumulator]:
    """Return the parameters and gradients of a loop that asks these checks (None: all)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=len(SIZES), clip_norm=0.1)
    if checks is not None:
        acc._checks = LoopChecks([model], checks=checks)
    data = torch.Generator().manual_seed(1)
    for _ in range(windows):
        for size in SIZES:
            x = torch.randn(size, 3, generator=data, dtype=torch.float64)
            acc.backward(model(x).square().sum(), units=size)
    return list(model.parameters()), seen.gradients, acc


def test_an_empty_list_of_checks_makes_the_same_update() -> None:
    with_all, gradients, _ = trained(None)
    with_none, others, _ = trained([])
    assert all(torch.equal(a, b) for a, b in zip(with_all, with_none, strict=True))
    assert len(gradients) == len(others) == 3
    for mine, theirs in zip(gradients, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class Places(Check):
    """Notes at which places it was asked."""

    windows = "1, 2, 4, 8, …"

    def __init__(self) -> None:
        self.places: list[str] = []

    def window_begins(self) -> Answer:
        self.places.append("begins")
        return None

    def micro_batch(self, micro: MicroBatch) -> Answer:
        self.places.append(f"{micro.number:g} of {max(micro.steps)}")
        return None

    def addition(self) -> Answer:
        self.places.append("added")
        return None

    def close(self, micro_batches: int) -> Answer:
        self.places.append(f"closes {micro_batches}")
        return None


def test_a_check_is_asked_at_four_places() -> None:
    check = Places()
    trained([check], windows=1)
    micros = [text for size in SIZES for text in (f"{size} of {len(SIZES)}", "added")]
    assert [one for one in check.places if one != "begins"][: len(micros)] == micros
    assert check.places[0] == "begins"
    assert check.places.count(f"closes {len(SIZES)}") == 1


class SmallLosses(Check):
    """A law of the test's own."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def micro_batch(self, micro: MicroBatch) -> Answer:
        return self.answer if float(micro.loss.detach()) < 1e9 else None


def test_a_new_law_is_one_class_in_the_list() -> None:
    with pytest.raises(LossError, match="it is small"):
        trained([SmallLosses(Refused(LossError, "it is small"))])
    with pytest.warns(UserWarning, match="it may be small"):
        trained([SmallLosses(Warned("it may be small"))])
    trained([SmallLosses(None)])


def test_the_page_shows_the_docstrings() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "run python scripts/laws_table.py"


@pytest.mark.parametrize("law", LAWS)
def test_one_law_is_one_file(law: type[Check]) -> None:
    module = inspect.getmodule(law)
    assert module is not None
    laws = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Check) and value is not Check
    ]
    assert laws == [law]
    assert all(parts_of(law))


class Mean(torch.autograd.Function):
    """A loss whose backward shows no graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.numel()
        ctx.shape = x.shape
        return x.mean()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope.expand(ctx.shape) / ctx.size


def one_by_one(divisor: float, size: int) -> Tensor:
    """Add the losses of some samples one by one."""
    torch.manual_seed(0)
    outputs = nn.Linear(3, 4)(torch.randn(size, 3))
    losses = [F.cross_entropy(outputs[i : i + 1], torch.tensor([i % 4])) for i in range(size)]
    total: Tensor = functools.reduce(torch.add, [loss / divisor for loss in losses])
    return total


def test_a_mean_that_is_added_sample_by_sample_is_refused() -> None:
    checks = LoopChecks([nn.Linear(3, 4)])
    with pytest.raises(LossError, match="total is a mean, a sum divided by 6"):
        checks.check(wb.Loss(one_by_one(6, 6), 6))
    checks.check(wb.Loss(one_by_one(1, 6), 6))
    checks.check(wb.Loss(one_by_one(5, 6), 6))  # a weight


def test_a_reduction_that_no_graph_shows_is_said_once() -> None:
    model = nn.Linear(3, 4)
    checks = LoopChecks([model])
    loss = Mean.apply(model(torch.randn(6, 3)).square())  # type: ignore[no-untyped-call]
    with pytest.warns(UserWarning, match="total comes out of mean, and its graph does not"):
        checks.check(wb.Loss(loss, 6))
    checks.check(wb.Loss(loss, 6))
    other = LoopChecks([model])
    other.check(wb.mean_loss(loss, 6))
    other.check(wb.Loss(loss, 1))
    other.check(wb.Loss(loss * 6, 6))


@pytest.mark.parametrize(
    "mean",
    [
        lambda losses: sum(losses.unbind()) / 5,
        lambda losses: torch.einsum("i,i->", losses, torch.ones(5)) / 5,
        lambda losses: 2 * Mean.apply(losses),
    ],
)
def test_a_reduction_by_hand_is_said(mean: Any) -> None:
    losses = nn.Linear(3, 1)(torch.randn(5, 3))[:, 0]
    with pytest.warns(UserWarning, match="does not show if it is the sum over units=5"):
        LoopChecks([]).check(wb.Loss(mean(losses), 5))
    for right in (sum(losses.unbind()), losses @ torch.ones(5), losses.mean() * torch.tensor(5)):
        LoopChecks([]).check(wb.Loss(right, 5))  # type: ignore[arg-type]


@pytest.mark.parametrize("units", [4, torch.tensor(4)])
def test_a_sum_that_mean_loss_was_given_is_refused(units: Any) -> None:
    logits, labels = nn.Linear(3, 4)(torch.randn(4, 3)), torch.arange(4)
    total = F.cross_entropy(logits, labels, reduction="sum")
    with pytest.raises(LossError, match="mean is a sum, and must be the mean over its units=4"):
        LoopChecks([]).check(wb.mean_loss(total, units))
    LoopChecks([]).check(wb.mean_loss(F.cross_entropy(logits, labels), units))


def test_as_many_labels_of_other_units_are_refused() -> None:
    """Three labels of three, and three of four: the ignored one was counted."""
    checks, logits = LoopChecks([]), nn.Linear(3, 4)(torch.randn(4, 3))
    checks.begin_window(1)
    checks.check(wb.mean_loss(F.cross_entropy(logits[:3], torch.arange(3)), 3))
    checks.end_micro_batch()
    with pytest.raises(LossError, match="but their units= are 3 and 4"):
        checks.check(wb.mean_loss(F.cross_entropy(logits, torch.tensor([0, -100, 1, 2])), 4))
