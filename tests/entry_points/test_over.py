"""The loop over a loader: its tail, leaving it, errors in it, several accumulators in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import wholebatch as wb
from tests.support import Whole, mlp, pieces, samples, sgd, summed, trained
from wholebatch.audit.model_calls import _Hook


def test_a_loader_is_started_once_per_epoch() -> None:
    class Counted(DataLoader):  # type: ignore[type-arg]
        started = 0

        def __iter__(self) -> Any:
            self.started += 1
            return super().__iter__()

    model = mlp()
    rows = [{"x": torch.randn(5).double(), "y": 1}] * 4
    loader = Counted(rows, batch_size=2, shuffle=True)
    acc = wb.Accumulator(model, sgd(model), steps=2)
    for _ in range(3):
        trained(model, acc, loader)
    assert (loader.started, acc.updates) == (3, 3)


def test_break_after_a_closed_window_loses_no_item() -> None:
    model = mlp()
    iterator = iter(pieces(samples(9), [1, 2, 3, 3]))
    acc = wb.Accumulator(model, sgd(model), steps=2)
    for micro in acc.over(iterator):
        if acc.backward(summed(model, micro), units=len(micro["y"])):
            break
    assert len(next(iterator)["y"]) == 3  # nothing was taken early


def test_a_window_in_which_every_body_skips() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    with pytest.raises(
        wb.errors.EmptyWindowError,
        match=r"none of the 2 micro-batches.* in place of loss\.backward",
    ):
        for _ in acc.over([1, 2]):
            pass
    acc = wb.Accumulator(model, sgd(model), steps=2, close=wb.Close(zero_units="skip"))
    for _ in acc.over([1, 2, 3]):
        pass
    assert (acc.updates, acc.skipped) == (0, 2)


@pytest.mark.parametrize("order", ["loss after", "detached", "earlier item"])
def test_a_window_of_two_models_is_refused(order: str) -> None:
    make, judge = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
    makers = wb.Accumulator(make, sgd(make), steps=4 if order == "earlier item" else 2)
    judges = wb.Accumulator(judge, sgd(judge), steps=2)

    def loop() -> None:
        for z in wb.over(torch.randn(4, 2, 3).double(), makers, judges):
            if order == "loss after":
                judges.backward(judge(make(z).detach()).square().sum(), units=2)
                makers.backward(judge(make(z)).square().sum(), units=2)
            else:
                makers.backward(judge(make(z)).square().sum(), units=2)
                judges.backward(judge(make(z).detach()).square().sum(), units=2)

    message = "mix the old and the new weights"
    if order == "earlier item":
        message = r"accumulators of 4 and 2 steps, .* begin and end together"
    with pytest.raises(wb.errors.WindowError, match=message):
        loop()
    hooks = [*make._forward_pre_hooks.values(), *judge._forward_pre_hooks.values()]
    assert not [hook for hook in hooks if not isinstance(hook, _Hook)]


@pytest.mark.parametrize("judged_by", ["accumulator", "optimizer"])
def test_a_judge_that_moves_in_a_window_without_a_shared_loop_is_told(judged_by: str) -> None:
    """The generator's last micro-batch would see another judge than those before it."""
    make, judge = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
    makers = wb.Accumulator(make, sgd(make), steps=2)
    judges = wb.Accumulator(judge, sgd(judge), steps=2)
    optimizer = sgd(judge)

    def loop() -> None:
        for z in makers.over(torch.randn(4, 2, 3).double()):
            real = judge(make(z).detach()).square().sum()
            if judged_by == "accumulator":
                judges.backward(real, units=2)
            else:
                optimizer.zero_grad()
                real.backward()
                optimizer.step()
            makers.backward(judge(make(z)).square().sum(), units=2)

    message = r"a parameter of another model changed in the middle of a window .* wb.over"
    with pytest.warns(UserWarning, match=message):
        loop()


def test_nesting_two_loops_of_one_accumulator_is_refused() -> None:
    model = mlp()
    first = wb.Accumulator(model, sgd(model), steps=2)
    other = wb.Accumulator(model, sgd(model), steps=2)
    with pytest.raises(wb.errors.WindowError, match="this loop is over: another"):
        for _ in first.over([1, 2]):
            assert list(first.over([])) == []
    x = samples(2)
    for _ in first.over([1, 2]):
        first.backward(summed(model, x), units=2)
        with pytest.raises(wb.errors.WindowError, match="a window is still open"):
            first.over([1])
        with pytest.raises(wb.errors.WindowError, match="already holds a gradient"):
            other.backward(summed(model, x), units=2)
        break
    first.discard()
    with pytest.raises(wb.errors.OptionError, match="same model in one"):
        wb.over([1], first, other)
    with pytest.raises(wb.errors.OptionError, match="at least one"):
        wb.over([1])


def test_an_exception_leaves_a_window_that_can_be_discarded_or_continued() -> None:
    model, batch = mlp(), samples(9)
    whole = Whole(model)
    whole.step(batch)
    acc = wb.Accumulator(model, sgd(model), steps=3)
    micros = pieces(batch, [2, 3, 4])
    with pytest.raises(ZeroDivisionError):
        for index, micro in enumerate(acc.over(micros)):
            if index == 1:
                _ = 1 / 0
            acc.backward(summed(model, micro), units=len(micro["y"]))
    assert acc.micro_batches == 1
    for micro in acc.over(micros[1:], continue_window=True):
        acc.backward(summed(model, micro), units=len(micro["y"]))
    whole.assert_same(model)

    acc.backward(summed(model, micros[0]), units=2)
    acc.discard()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert acc.updates == 1


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("in the middle of backward")


def test_a_backward_that_fails_half_way_must_be_discarded() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    batch = samples(4)
    hidden = model[:2](batch["x"])  # type: ignore[index]
    total = functional.cross_entropy(
        model[2:](Explodes.apply(hidden)),  # type: ignore[index]
        batch["y"],
        reduction="sum",
    )
    with pytest.raises(RuntimeError, match="middle of backward"):
        acc.backward(total, units=4)
    assert model[4].weight.grad is not None  # type: ignore[index]
    with pytest.raises(wb.errors.WindowError, match="failed half way"):
        acc.backward(summed(model, batch), units=4)
    acc.discard()
    assert acc.backward(summed(model, batch), units=4) is None


def test_an_error_of_the_loader_comes_when_its_item_is_due() -> None:
    model, batch = mlp(), samples(6)

    def loader() -> Iterator[Any]:
        yield from pieces(batch, [3, 3])
        raise OSError("disk")

    acc = wb.Accumulator(model, sgd(model), steps=3)
    backwards = 0
    with pytest.raises(OSError, match="disk"):
        for micro in acc.over(loader()):
            acc.backward(summed(model, micro), units=3)
            backwards += 1
    assert backwards == 2
    assert acc.micro_batches == 2


def test_data_loader_with_a_sampler_that_repeats_to_fill_a_rank() -> None:
    from torch.utils.data import DistributedSampler

    data = TensorDataset(torch.arange(7.0).double())
    rows = []
    for rank in range(2):
        model = nn.Linear(1, 1).double()
        sampler: Any = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        acc = wb.Accumulator(model, sgd(model), steps=2)
        for (x,) in acc.over(DataLoader(data, batch_size=2, sampler=sampler)):
            rows += x.tolist()
            acc.backward(model(x[:, None]).sum(), units=len(x))
    assert sorted(rows) == [0, 1, 2, 3, 4, 5, 6]
