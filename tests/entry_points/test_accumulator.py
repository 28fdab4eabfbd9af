"""Accumulator against the undivided batch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import wholebatch as wb
from tests.support import (
    EXACT,
    Seen,
    Whole,
    adamw,
    distance,
    mlp,
    pieces,
    samples,
    sgd,
    summed,
    trained,
)

SPLITS = [
    [24],
    [8, 8, 8],
    [5, 1, 7, 11],
    [23, 1],
    [1] * 24,
    [3, 9, 2, 2, 2, 6],
]


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("clip", [None, 0.05, 100.0])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_same_update_as_the_undivided_batch(
    sizes: list[int], clip: float | None, make: Any
) -> None:
    model, batch = mlp(), samples(24)
    whole = Whole(model, make, clip_norm=clip)
    loss = whole.step(batch)
    optimizer = make(model)
    seen = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=len(sizes), clip_norm=clip)
    [step] = trained(model, acc, pieces(batch, sizes))
    whole.assert_same(model, seen)
    assert step.loss == pytest.approx(loss, rel=1e-14)
    assert (step.update, step.units, step.micro_batches) == (1, 24.0, len(sizes))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("number", [1, 2, 3, 16, 64])
def test_many_micro_batches_over_several_windows(number: int) -> None:
    model = mlp()
    whole = Whole(model, adamw, clip_norm=0.5)
    optimizer = adamw(model)
    seen = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=number, clip_norm=0.5)
    micros = []
    for window in range(3):
        sizes = [1 + (window + i) % 3 for i in range(number)]
        batch = samples(sum(sizes))
        whole.step(batch)
        micros += pieces(batch, sizes)
    assert len(trained(model, acc, micros)) == 3
    whole.assert_same(model, seen, at_most=10 * EXACT)  # Adam's square root amplifies over steps


def test_a_short_last_window_is_closed_with_its_own_scale() -> None:
    model = mlp()
    whole = Whole(model)
    first, tail = samples(12), samples(5)
    whole.step(first)
    whole.step(tail)
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=4)
    steps = trained(model, acc, pieces(first, [3, 3, 3, 3]) + pieces(tail, [3, 2]))
    assert [s.micro_batches for s in steps] == [4, 2]
    whole.assert_same(model, seen)


def test_the_tail_does_not_leak_into_the_next_epoch() -> None:
    model = mlp()
    whole = Whole(model)
    a, b = samples(9), samples(4)
    loader = pieces(a, [3, 3, 3]) + pieces(b, [4])
    acc = wb.Accumulator(model, sgd(model), steps=3)
    for _ in range(2):
        whole.step(a)
        whole.step(b)
        trained(model, acc, loader)
    assert acc.updates == 4
    assert acc.epoch == 2
    whole.assert_same(model, at_most=10 * EXACT)


class TinyLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(torch.tanh(self.mix(self.embed(tokens))).cumsum(1))
        return result


@pytest.mark.parametrize("device_units", [False, True])
def test_masked_tokens_with_very_different_counts(device_units: bool) -> None:
    model = TinyLm().double()
    tokens = torch.randint(0, 11, (12, 20))
    labels = torch.randint(0, 11, (12, 20))
    for row, keep in enumerate([20, 1, 0, 3, 20, 20, 2, 1, 0, 0, 7, 1]):
        labels[row, keep:] = -100

    def mean_over_tokens(model: nn.Module, micro: Any) -> torch.Tensor:
        return functional.cross_entropy(model(micro[0]).flatten(0, 1), micro[1].flatten())

    whole = Whole(model, loss=mean_over_tokens, clip_norm=0.1)
    whole.step((tokens, labels))
    optimizer = sgd(model)
    seen = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=5, clip_norm=0.1)
    sizes = [1, 4, 2, 3, 2]
    for micro in acc.over(zip(tokens.split(sizes), labels.split(sizes), strict=True)):
        loss = wb.cross_entropy(model(micro[0]), micro[1])
        acc.backward(loss if device_units else wb.Loss(loss.total, int(loss.units)))
    whole.assert_same(model, seen)


def test_hand_written_loop_is_wrong_on_the_same_case() -> None:
    """So that the tests above can fail: the usual mean/K loop is far off on uneven sizes."""
    model, batch = mlp(), samples(24)
    whole = Whole(model)
    whole.step(batch)
    optimizer = sgd(model)
    for micro in pieces(batch, [20, 1, 1, 2]):
        (functional.cross_entropy(model(micro["x"]), micro["y"]) / 4).backward()
    optimizer.step()
    update = [a - b for a, b in zip(model.parameters(), whole.start.parameters(), strict=True)]
    assert distance(update, whole.updates()) > 0.1


def test_steps_change_by_update_by_epoch_and_by_a_function() -> None:
    for steps, expected in (
        ({0: 2, 2: 3}, [2, 2, 3, 2]),
        (lambda update: update + 2, [2, 3, 4]),
        (wb.by_epoch({0: 4, 1: 9}), [4, 4, 1]),
    ):
        model = mlp()
        acc = wb.Accumulator(model, sgd(model), steps=steps)
        made = trained(model, acc, pieces(samples(9), [1] * 9))
        assert [s.micro_batches for s in made] == expected
    assert [s.micro_batches for s in trained(model, acc, pieces(samples(9), [1] * 9))] == [9]


def test_a_function_of_the_update_must_return_a_number_of_micro_batches() -> None:
    model = mlp()
    with pytest.raises(wb.errors.OptionError, match=r"returns 0 for update 0: it must return a"):
        wb.Accumulator(model, sgd(model), steps=lambda update: update)


def test_changing_steps_is_exact() -> None:
    model = mlp()
    whole = Whole(model)
    first, second = samples(6), samples(10)
    whole.step(first)
    whole.step(second)
    acc = wb.Accumulator(model, sgd(model), steps=2)
    for micro in acc.over(pieces(first, [2, 4]) + pieces(second, [1, 2, 3, 4])):
        if acc.backward(summed(model, micro), units=len(micro["y"])) is not None:
            acc.steps = 4
    whole.assert_same(model)


def test_without_over_the_count_closes_and_flush_takes_the_tail() -> None:
    model = mlp()
    whole = Whole(model)
    batch, tail = samples(8), samples(3)
    whole.step(batch)
    whole.step(tail)
    acc = wb.Accumulator(model, sgd(model), steps=2)
    closed = [acc.backward(summed(model, m), units=len(m["y"])) for m in pieces(batch, [7, 1])]
    assert closed[0] is None
    assert closed[1] is not None
    assert acc.flush() is None
    assert acc.backward(summed(model, tail), units=3) is None
    step = acc.flush()
    assert step is not None
    assert step.micro_batches == 1
    whole.assert_same(model)


_ENDS_OPEN = """
import torch, wholebatch as wb
model = torch.nn.Linear(2, 1)
acc = wb.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
acc.backward(model(torch.ones(4, 2)).square().sum(), units=4)
"""


@pytest.mark.slow
def test_a_script_that_ends_in_a_window_is_warned() -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDS_OPEN], capture_output=True, text=True)
    assert ended.returncode == 0
    assert "deleted with an open window (micro-batches in it: 1)" in ended.stderr
    assert "Traceback" not in ended.stderr
