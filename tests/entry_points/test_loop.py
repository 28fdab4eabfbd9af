"""A loop: what an item is for its window, and what is asked how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import wholebatch as wb
from tests.support import EXACT, Whole, distance, mlp, pieces, samples, sgd, summed
from wholebatch.errors import OptionError, WindowError


def test_the_size_of_the_next_window_follows_a_new_schedule_and_the_epoch() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=wb.by_epoch({0: 2, 1: 3}))
    assert acc.steps == 2
    sizes = []
    for _ in range(2):
        for micro in acc.over(pieces(samples(6), [1] * 6)):
            step = acc.backward(summed(model, micro), units=1)
            sizes += [step.micro_batches] if step else []
    acc.steps = 5
    assert (sizes, acc.steps) == ([2, 2, 2, 3, 3], 5)


@pytest.mark.parametrize("call", [wb.Accumulator.discard, wb.Accumulator.flush])
@pytest.mark.parametrize("uses", [False, True])
def test_an_item_outlives_the_window_that_is_dropped_or_closed_in_it(
    call: Callable[[Any], Any], uses: bool
) -> None:
    """Its backward begins a new window; without one it belongs to none."""
    model, batch = mlp(), samples(12)
    parts = pieces(batch, [1, 2, 3, 4, 2])
    whole = Whole(model)
    groups = [parts[2:5]] if uses else [parts[3:5]]
    if call is wb.Accumulator.flush:
        groups = [parts[:2], *groups]
    for group in groups:
        whole.step({name: torch.cat([part[name] for part in group]) for name in batch})
    acc = wb.Accumulator(model, sgd(model), steps=3)
    for index, micro in enumerate(acc.over(parts)):
        if index == 2:
            call(acc)
            if not uses:
                continue
        acc.backward(summed(model, micro), units=len(micro["y"]))
    assert acc.updates == len(groups)
    whole.assert_same(model)


def test_a_loop_that_is_left_between_two_backwards_of_an_item_counts_the_item() -> None:
    model, batch = mlp(), samples(6)
    parts = pieces(batch, [1, 2, 3])
    acc = wb.Accumulator(model, sgd(model), steps=3)
    iterator = iter(parts)
    for micro in acc.over(iterator):
        acc.backward(summed(model, micro), units=1, more=True)
        break
    for micro in acc.over(iterator, continue_window=True):
        step = acc.backward(summed(model, micro), units=len(micro["y"]))
    assert step is not None
    assert (step.micro_batches, step.units) == (3, 6.0)


def of_whole_batch(model: Any) -> wb.WholeBatch:
    def loss(model: Any, micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    return wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=2)


def test_a_whole_batch_loop_leaves_out_what_its_body_does_not_step_with() -> None:
    model = mlp()
    train = of_whole_batch(model)
    for index, batch in enumerate(train.over(pieces(samples(9), [3, 3, 3]))):
        if index != 1:
            train.step(batch)
    assert train.updates == 2
    assert train.state_dict()["feed"] is None


@pytest.mark.parametrize("micro_batches", [0, 1, 5, 10])
def test_updates_per_epoch_are_those_of_the_loop(micro_batches: int) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps={0: 4, 1: 2, 2: 3})
    loader = pieces(samples(10), [1] * 10)[:micro_batches]
    for _ in range(2):  # the second epoch's windows follow the schedule from where it is
        before, wanted = acc.updates, acc.updates_per_epoch(loader)
        for micro in acc.over(loader):
            acc.backward(summed(model, micro), units=1)
        assert acc.updates - before == wanted
    with pytest.raises(OptionError, match=r"has no len.*step\.update"):
        acc.updates_per_epoch(iter(range(3)))  # type: ignore[arg-type]


def test_what_a_window_does_before_its_first_forward() -> None:
    """A decoder is kept at unit norm."""
    model, batch = mlp(), samples(12)
    whole = Whole(model)

    def unit_norm(model: Any) -> None:
        with torch.no_grad():
            model[0].weight.div_(model[0].weight.norm(dim=0))

    close = wb.Close(on_open=lambda: unit_norm(model))
    acc = wb.Accumulator(model, sgd(model), steps=2, close=close)
    for half in pieces(batch, [6, 6]):
        unit_norm(whole.model)
        whole.step(half)
    for micro in acc.over(pieces(batch, [3] * 4)):
        acc.backward(summed(model, micro), units=3)
    assert distance(model.parameters(), whole.model.parameters()) <= EXACT
    with pytest.raises(WindowError, match="whose first forward has run already"):
        acc.backward(summed(model, batch), units=12)
