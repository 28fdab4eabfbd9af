"""Windows of own loops: their tail, their size at run time, what opens them, what fails in them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.support import Whole, mlp, pieces, samples, sgd, summed
from wholebatch.errors import LossError, WindowError


def joined(parts: list[Any]) -> Any:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# ---------------------------------------------------------------- nothing is read ahead


def test_without_an_optimizer_the_last_item_is_known_before() -> None:
    """The body of the loop steps, so the tail must close in it."""
    model, parts = mlp(), pieces(samples(9), [2, 3, 4])
    whole = Whole(model)
    whole.step(joined(parts[:2]))
    whole.step(parts[2])
    acc, optimizer = wb.Accumulator(model, None, steps=2), sgd(model)
    for micro in acc.over(parts):
        if acc.backward(summed(model, micro), units=len(micro["y"])):
            optimizer.step()
            optimizer.zero_grad()
    whole.assert_same(model)


# ---------------------------------------------------------------- nothing is kept


@pytest.mark.parametrize("leave", ["end", "break", "held"])
@pytest.mark.parametrize("way", ["backward", "run"])
def test_a_deleted_accumulator_is_gone_at_once(leave: str, way: str) -> None:
    norm = nn.BatchNorm1d(5).double()
    model = nn.Sequential(norm, mlp())
    acc = wb.Accumulator(model, sgd(model), steps=2, batchnorm="freeze")
    parts = pieces(samples(8), [2] * 4)
    items = [weakref.ref(batch["x"]) for batch in parts]

    def loss(micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    gone = weakref.ref(acc)
    gc.disable()
    try:
        loop = acc.over(iter(parts))
        for index, micro in enumerate(loop):
            if way == "run":
                acc.run(loss, micro)
            else:
                acc.backward(loss(micro))
            if index == 2 and leave != "end":
                break
        if leave != "held":
            del loop
        del acc, micro
        assert gone() is None
        assert not any(module._forward_hooks for module in model.modules())
        before = norm.running_mean.clone()  # type: ignore[union-attr]
        model.train()(torch.randn(4, 5).double())
        assert not torch.equal(before, norm.running_mean)  # type: ignore[arg-type]
        if leave != "held":
            del parts
            assert [item() for item in items] == [None] * 4
    finally:
        gc.enable()


def test_a_loop_that_a_progress_bar_holds_is_over_when_the_next_one_begins() -> None:
    model, parts = mlp(), pieces(samples(12), [3] * 4)
    acc = wb.Accumulator(model, sgd(model), steps=4)
    bar = acc.over(parts)
    acc.backward(summed(model, next(bar)), units=3)
    with pytest.raises(WindowError, match="still open with 1 of 4"):
        acc.over(parts)
    acc.discard()
    whole = Whole(model)
    whole.step(joined(parts))
    for micro in acc.over(parts):
        acc.backward(summed(model, micro), units=3)
    whole.assert_same(model)
    with pytest.raises(WindowError, match="this loop is over"):
        next(bar)


# ---------------------------------------------------------------- what fails


@pytest.mark.parametrize("wrong", ["a float", "no units", "other units"])
@pytest.mark.parametrize("way", ["over", "plain"])
def test_a_part_that_is_refused_leaves_the_micro_batch_as_it_was(wrong: str, way: str) -> None:
    model, parts = mlp(), pieces(samples(9), [2, 3, 4])
    whole = Whole(model)
    whole.step(joined(parts))
    acc = wb.Accumulator(model, sgd(model), steps=3)
    for index, micro in enumerate(acc.over(parts) if way == "over" else parts):
        total, units = summed(model, micro), len(micro["y"])
        if index != 1:
            if way == "plain" and index == 2:
                with pytest.raises(WindowError, match=r"in parts \(more=True\) was refused"):
                    acc.backward(total, units=units)
                acc.discard()
                return
            acc.backward(total, units=units)
            continue
        acc.backward(total, units=units, more=True)
        other: Any = 0 * summed(model, micro)
        with pytest.raises(LossError):
            if wrong == "a float":
                acc.backward(1.0, units=units)  # type: ignore[call-overload]
            elif wrong == "no units":
                acc.backward(other)
            else:
                acc.backward(other, units=units + 1)
    whole.assert_same(model)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_a_last_backward_that_fails_is_raised_in_the_body_alone() -> None:
    model, parts = mlp(), pieces(samples(9), [2, 3, 4])
    acc = wb.Accumulator(model, sgd(model), steps=2)
    raised = []

    def loop() -> None:
        for index, micro in enumerate(acc.over(parts)):
            total = summed(model, micro)
            try:
                acc.backward(Fails.apply(total) if index == 1 else total, units=2)
            except (ZeroDivisionError, WindowError) as error:
                raised.append((index, type(error)))

    with pytest.warns(UserWarning, match="has ended in a window whose last backward failed"):
        loop()
    assert raised == [(1, ZeroDivisionError), (2, WindowError)]
    acc.discard()


# ---------------------------------------------------------------- a window per call


def test_a_window_has_as_many_micro_batches_as_it_is_given() -> None:
    model = mlp()
    whole, acc = Whole(model), wb.Accumulator(model, sgd(model), steps=1)
    for sizes in ((2, 1, 4), (3,), (1, 1, 1, 1, 5)):
        parts = pieces(samples(sum(sizes)), list(sizes))
        whole.step(joined(parts))
        for micro in acc.window(parts):
            step = acc.backward(summed(model, micro), units=len(micro["y"]))
        assert step is not None
        assert step.micro_batches == len(sizes)
    assert list(acc.window([])) == []
    assert (acc.updates, acc.epoch, acc.state_dict()["feed"]) == (3, 0, None)
    whole.assert_same(model)


def test_a_window_that_is_left_does_not_move_the_position_in_the_loader() -> None:
    model, parts = mlp(), pieces(samples(8), [2] * 4)
    acc = wb.Accumulator(model, sgd(model), steps=2)
    for index, micro in enumerate(acc.over(parts)):
        acc.backward(summed(model, micro), units=2)
        if index == 1:
            break
    for micro in acc.window(parts[:2]):
        acc.backward(summed(model, micro), units=2)
        break
    acc.discard()
    assert acc.state_dict()["feed"]["fetched"] == 2
