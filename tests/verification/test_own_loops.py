"""Loops that outsiders wrote: whose number a weight is, what flows, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import wholebatch as wb
from tests.verification.answers import found_in, quiet
from wholebatch.verification import LoopVerdict


def watched(loop: Callable[[], None]) -> LoopVerdict:
    torch.manual_seed(0)
    with quiet(), wb.watch() as watch:
        loop()
    return watch.verdict


def samples(number: int, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(torch.randn(number, 6), torch.randint(0, 3, (number,))), batch_size=batch_size
    )


def _stream(
    clear_first: bool = False, epochs: int = 2, number: int = 72, weight: float = 1.0
) -> Callable[[], None]:
    def loop() -> None:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = samples(number)
        for _ in range(epochs):
            if clear_first:
                optimizer.zero_grad()
            for i, (x, y) in enumerate(loader):
                (weight * F.cross_entropy(model(x), y) / 4).backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    return loop


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (_stream(clear_first=True), "the last 2 micro-batches of a pass over the data are cleared"),
        (_stream(), "with 4 more"),
        (_stream(epochs=1), "2 micro-batches after the last optimizer step"),
    ],
)
def test_a_tail_that_is_dropped_or_leaks_has_one_name(loop: Any, said: str) -> None:
    verdict = watched(loop)
    assert verdict.mistakes == ("no-update",), str(verdict)
    assert said in verdict.line
    assert "also step at the end of the data" in str(verdict)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(x, carry)
        return self.head(state), torch.where(state > 0, state, carry).detach()


def test_data_that_flows_through_windows_of_wholebatch_is_no_construction() -> None:
    def loop() -> None:
        model = _Recurrent()
        acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), steps=4)
        carry = torch.zeros(4, 8)
        for x, y in acc.over(samples(32)):
            out, carry = model(x, carry)
            acc.backward(F.cross_entropy(out, y, reduction="sum"), units=len(y))

    verdict = watched(loop)
    assert found_in(verdict) == "not judged"
    assert "by construction" not in verdict.line


def test_two_models_in_turn_and_a_head_for_each_task() -> None:
    def of_two_models() -> None:
        one, other = nn.Linear(6, 3), nn.Linear(6, 3)
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1)
        for i, (x, y) in enumerate(samples(64)):
            (F.cross_entropy(one(x), y) / 4).backward()
            (F.cross_entropy(other(x), y) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    def of_two_tasks() -> None:
        backbone, heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
        optimizer = torch.optim.SGD([*backbone.parameters(), *heads.parameters()], 0.1)
        for i, (x, y) in enumerate(samples(64)):
            (F.cross_entropy(heads[i % 2](backbone(x)), y) / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()

    assert watched(of_two_models).same
    assert watched(of_two_tasks).same


@pytest.mark.parametrize(("divisor", "found"), [(4, "right"), (1, "not-divided")])
def test_the_parts_of_a_gan_are_windows_of_their_own(divisor: int, found: str) -> None:
    def loop() -> None:
        generator, critic = (
            nn.Linear(5, 6),
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
        )
        of_g = torch.optim.SGD(generator.parameters(), 0.1)
        of_d = torch.optim.SGD(critic.parameters(), 0.1)
        bce = F.binary_cross_entropy_with_logits
        for i, (real, _) in enumerate(samples(64)):
            fake = generator(torch.randn(len(real), 5))
            (bce(critic(real), torch.ones(len(real), 1)) / 4).backward()
            (bce(critic(fake.detach()), torch.zeros(len(real), 1)) / divisor).backward()
            critic.requires_grad_(False)
            (bce(critic(fake), torch.ones(len(real), 1)) / 4).backward()
            critic.requires_grad_(True)
            if (i + 1) % 4 == 0:
                for optimizer in (of_d, of_g):
                    optimizer.step()
                    optimizer.zero_grad()

    verdict = watched(loop)
    assert found_in(verdict) == found, str(verdict)
    assert (found == "right") == ("targets 0" not in verdict.line)


@pytest.mark.parametrize(
    ("tail", "with_loader", "found"),
    [(4, True, "right"), (4, False, "right"), (3, True, "nominal-count"), (3, False, "not judged")],
)
def test_a_short_window_after_the_first_eight(tail: int, with_loader: bool, found: str) -> None:
    """Later windows are only counted, but for those at the end of a DataLoader."""

    def loop() -> None:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for i, (x, y) in enumerate(samples(4 * (4 * 11 + tail))):
            (F.cross_entropy(model(x), y) / 4).backward()
            if (i + 1) % 4 == 0 or i + 1 == 44 + tail:
                optimizer.step()
                optimizer.zero_grad()

    batch = [torch.randn(4, 6), torch.randint(0, 3, (4,))]
    verdict = watched(loop if with_loader else lambda: _by_hand(batch, 44 + tail))
    assert found_in(verdict) == found, str(verdict)
    assert (found == "not judged") == ("was only counted" in verdict.line)


def _by_hand(batch: list[Tensor], count: int) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(count):
        x, y = batch[0] + i, (batch[1] + i) % 3
        (F.cross_entropy(model(x), y) / 4).backward()
        if (i + 1) % 4 == 0 or i + 1 == count:
            optimizer.step()
            optimizer.zero_grad()


def test_a_watch_counts_once_it_knows() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with quiet(), wb.watch(model, optimizer) as watch:
        for i, (x, y) in enumerate(samples(4 * 4 * 10)):
            (F.cross_entropy(model(x), y) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if i == 4 * 9:
                assert all(not p._backward_hooks for p in model.parameters())
                assert torch.overrides._get_current_function_mode() is None
    assert watch.verdict.same
    assert len(watch.verdict.trials) == 8
    assert "10 windows seen" in str(watch.verdict)


def test_a_verdict_tells_the_lines_and_the_loops_own_numbers() -> None:
    verdict = watched(_stream(number=60, epochs=1, weight=1.0))  # 15 micro-batches: 3 are left
    assert "no-update" in verdict.mistakes

    def nominal() -> None:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for count in (4, 4, 7):
            for x, y in samples(4 * count):
                (F.cross_entropy(model(x), y) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()

    verdict = watched(nominal)
    assert "`/ 4` where 7 micro-batches came" in verdict.line
    assert "the loss is at functional.py" not in str(verdict)
    places = next(note for note in verdict.notes if note.startswith("the loss is at"))
    assert places.count("test_own_loops.py:") == 3
