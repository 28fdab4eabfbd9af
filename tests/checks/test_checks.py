"""The list of checks: empty, with one more law, and as docs/laws.md shows it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from scripts.laws_table import PAGE, parts_of, with_table
from tests.support import Seen
from wholebatch.checks.check import Answer, Check, MicroBatch, Refused, Warned
from wholebatch.checks.loop_checks import LAWS, LoopChecks
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

    def window_begins(self, models: Sequence[nn.Module]) -> Answer:
        self.places.append("begins")
        return None

    def micro_batch(self, micro: MicroBatch) -> Answer:
        self.places.append(f"{micro.number:g} of {micro.steps}")
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
