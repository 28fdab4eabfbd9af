"""A loop: what an item is for its window, and what is asked how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import wholebatch as wb
from tests.support import Whole, mlp, pieces, samples, sgd, summed
from wholebatch.errors import StateError


@pytest.mark.parametrize("audit", [True, False])
def test_steps_is_asked_once_per_window(audit: bool) -> None:
    asked: list[int] = []

    def steps(update: int) -> int:
        asked.append(update)
        return 2 + update % 2

    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=steps, audit=audit)
    for micro in acc.over(pieces(samples(15), [1] * 15)):
        acc.backward(summed(model, micro), units=1)
        assert acc.steps in (2, 3)
    assert acc.updates == 6
    assert asked in ([*range(6)], [*range(7)])


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


def test_bodies_without_a_backward_are_not_counted_in_the_next_loop() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=3)
    for _ in acc.over([1, 2]):
        break
    sizes = []
    for micro in acc.over(pieces(samples(3), [1, 1, 1])):
        step = acc.backward(summed(model, micro), units=1)
        sizes += [step.micro_batches] if step else []
    assert sizes == [3]


def of_whole_batch(model: Any) -> wb.WholeBatch:
    def loss(model: Any, micro: Any) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    return wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=2)


@pytest.mark.parametrize("entry", ["WholeBatch", "Accumulator"])
def test_both_entry_points_save_and_resume_alike(entry: str) -> None:
    batches = pieces(samples(20), [4] * 5)

    def run(model: Any, saved: Any, stop: int | None) -> Any:
        used: list[int] = []
        train: Any
        if entry == "WholeBatch":
            train = of_whole_batch(model)
        else:
            train = wb.Accumulator(model, sgd(model), steps=1)
        if saved is not None:
            train.load_state_dict(saved)
        for index, batch in enumerate(train.over(batches)):
            with pytest.raises(StateError, match="before this item was used"):
                train.state_dict()
            if entry == "WholeBatch":
                train.step(batch)
            else:
                train.backward(summed(model, batch), units=4)
            used.append(index)
            if len(used) == stop:
                return train.state_dict()
        return used

    model, whole = mlp(), mlp()
    whole.load_state_dict(model.state_dict())
    run(whole, None, None)
    saved = run(model, None, 2)
    assert saved["feed"]["fetched"] == 2
    assert run(model, saved, None) == [0, 1, 2]
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_whole_batch_loop_leaves_out_what_its_body_does_not_step_with() -> None:
    model = mlp()
    train = of_whole_batch(model)
    for index, batch in enumerate(train.over(pieces(samples(9), [3, 3, 3]))):
        if index != 1:
            train.step(batch)
    assert train.updates == 2
    assert train.state_dict()["feed"] is None
