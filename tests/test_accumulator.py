"""Accumulator against the undivided batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import wholebatch as wb
from tests.support import EXACT, Seen, Whole, adamw, distance, mlp, pieces, samples, sgd, summed

SPLITS = [
    [24],
    [8, 8, 8],
    [5, 1, 7, 11],
    [23, 1],
    [1] * 24,
    [3, 9, 2, 2, 2, 6],
]


def run(model: nn.Module, acc: wb.Accumulator, micros: Any) -> list[wb.Step]:
    steps = []
    for micro in acc.over(micros):
        step = acc.backward(summed(model, micro), units=len(micro["y"]))
        if step is not None:
            steps.append(step)
    return steps


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
    [step] = run(model, acc, pieces(batch, sizes))
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
    assert len(run(model, acc, micros)) == 3
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
    steps = run(model, acc, pieces(first, [3, 3, 3, 3]) + pieces(tail, [3, 2]))
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
        run(model, acc, loader)
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


def test_steps_change_by_update_and_by_epoch() -> None:
    for steps, expected in (
        ({0: 2, 2: 3}, [2, 2, 3, 2]),
        (wb.by_epoch({0: 4, 1: 9}), [4, 4, 1]),
    ):
        model = mlp()
        acc = wb.Accumulator(model, sgd(model), steps=steps)
        made = run(model, acc, pieces(samples(9), [1] * 9))
        assert [s.micro_batches for s in made] == expected
    assert [s.micro_batches for s in run(model, acc, pieces(samples(9), [1] * 9))] == [9]


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


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from ({"x": torch.randn(5, dtype=torch.float64), "y": torch.tensor(1)},) * 7


@pytest.mark.parametrize("kind", ["sized", "stream", "infinite", "iterator"])
def test_every_kind_of_loader(kind: str) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=3)
    if kind == "infinite":
        loader: Any = itertools.cycle(pieces(samples(6), [2, 2, 2]))
        taken = 0
        for micro in acc.over(loader):
            acc.backward(summed(model, micro), units=2)
            taken += 1
            if acc.updates == 4:
                break
        assert taken == 12
        return
    if kind == "sized":
        loader = DataLoader([{"x": torch.randn(5).double(), "y": 1}] * 7, batch_size=1)
    elif kind == "stream":
        loader = DataLoader(Stream(), batch_size=1)
    else:
        loader = iter(pieces(samples(7), [1] * 7))
    assert [s.micro_batches for s in run(model, acc, loader)] == [3, 3, 1]


def test_break_after_a_closed_window_loses_no_item() -> None:
    model = mlp()
    iterator = iter(pieces(samples(9), [1, 2, 3, 3]))
    acc = wb.Accumulator(model, sgd(model), steps=2)
    for micro in acc.over(iterator):
        if acc.backward(summed(model, micro), units=len(micro["y"])):
            break
    assert len(next(iterator)["y"]) == 3  # nothing was taken early


def test_break_in_a_window_keeps_the_item_looked_ahead_at() -> None:
    model = mlp()
    whole = Whole(model)
    batch = samples(10)
    whole.step(batch)
    iterator = iter(pieces(batch, [1, 2, 3, 4]))
    acc = wb.Accumulator(model, sgd(model), steps=4)
    for micro in acc.over(iterator):
        acc.backward(summed(model, micro), units=len(micro["y"]))
        break
    with pytest.raises(wb.errors.WindowError, match="still open with 1 of 4"):
        acc.over(iterator)
    for micro in acc.over(iterator, continue_window=True):
        acc.backward(summed(model, micro), units=len(micro["y"]))
    assert acc.updates == 1
    whole.assert_same(model)


def test_a_body_that_skips_backward_still_uses_its_place() -> None:
    model = mlp()
    whole = Whole(model)
    batch = samples(12)
    kept = {name: torch.cat([leaf[:3], leaf[6:9]]) for name, leaf in batch.items()}
    whole.step(kept)
    whole.step({name: leaf[9:] for name, leaf in batch.items()})
    acc = wb.Accumulator(model, sgd(model), steps=2)
    extra = pieces(batch, [3, 3, 3, 3])
    order = [extra[0], extra[2], extra[3], extra[1]]
    for index, micro in enumerate(acc.over(order)):
        if index == 3:  # the last of the second window
            continue
        acc.backward(summed(model, micro), units=3)
    assert acc.updates == 2
    assert acc.last_step is not None
    assert acc.last_step.micro_batches == 1
    whole.assert_same(model)


def test_a_window_in_which_every_body_skips() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=2)
    with pytest.raises(wb.errors.EmptyWindowError, match="none of the 2 micro-batches"):
        for _ in acc.over([1, 2]):
            pass
    acc = wb.Accumulator(model, sgd(model), steps=2, zero_units="skip")
    for _ in acc.over([1, 2, 3]):
        pass
    assert (acc.updates, acc.skipped) == (0, 2)


def test_more_says_that_another_backward_of_the_micro_batch_follows() -> None:
    model, batch = mlp(), samples(10)

    def two_terms(model: nn.Module, micro: Any) -> torch.Tensor:
        out = model(micro["x"])
        return functional.cross_entropy(out, micro["y"]) + out.square().mean(1).mean()

    whole = Whole(model, loss=two_terms)
    whole.step(batch)
    acc = wb.Accumulator(model, sgd(model), steps=3)
    for micro in acc.over(pieces(batch, [1, 6, 3])):
        acc.backward(summed(model, micro), units=len(micro["y"]), more=True)
        step = acc.backward(model(micro["x"]).square().mean(1).sum(), units=0)
    assert step is not None
    assert step.micro_batches == 3
    whole.assert_same(model)


def test_second_backward_without_more_is_refused() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=3)
    with pytest.raises(wb.errors.WindowError, match="more=True"):
        for micro in acc.over(pieces(samples(4), [2, 2])):
            acc.backward(summed(model, micro), units=2)
            acc.backward(summed(model, micro), units=2)


def test_two_accumulators_add_only_into_their_own_parameters() -> None:
    torch.manual_seed(0)
    generator = nn.Linear(3, 5).double()
    judge = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    real, noise = torch.randn(14, 5).double(), torch.randn(14, 3).double()
    bce = functional.binary_cross_entropy_with_logits

    def judge_loss(d: Any, g: Any, x: Any, z: Any, how: str) -> torch.Tensor:
        fake = g(z).detach()
        return bce(d(x), torch.ones(len(x), 1).double(), reduction=how) + bce(
            d(fake), torch.zeros(len(x), 1).double(), reduction=how
        )

    def generator_loss(d: Any, g: Any, z: Any, how: str) -> torch.Tensor:
        return bce(d(g(z)), torch.ones(len(z), 1).double(), reduction=how)

    d, g = copy.deepcopy(judge), copy.deepcopy(generator)
    opt_d, opt_g = sgd(d), sgd(g)
    judge_loss(d, g, real, noise, "mean").backward()
    generator_grads = torch.autograd.grad(generator_loss(d, g, noise, "mean"), list(g.parameters()))
    opt_d.step()
    for parameter, gradient in zip(g.parameters(), generator_grads, strict=True):
        parameter.grad = gradient
    opt_g.step()

    acc_d = wb.Accumulator(judge, sgd(judge), steps=3)
    acc_g = wb.Accumulator(generator, sgd(generator), steps=3)
    sizes = [2, 9, 3]
    start_d, start_g = copy.deepcopy(judge), copy.deepcopy(generator)
    for x, z in wb.over(zip(real.split(sizes), noise.split(sizes), strict=True), acc_d, acc_g):
        total_d = judge_loss(judge, generator, x, z, "sum")
        total_g = generator_loss(judge, generator, z, "sum")
        acc_g.backward(total_g, units=len(z))  # flows through the judge, adds nothing there
        acc_d.backward(total_d, units=len(x))
    for ours, theirs, start in ((judge, d, start_d), (generator, g, start_g)):
        update = [a - b for a, b in zip(ours.parameters(), start.parameters(), strict=True)]
        right = [a - b for a, b in zip(theirs.parameters(), start.parameters(), strict=True)]
        assert distance(update, right) <= EXACT


def test_accumulators_with_steps_of_their_own() -> None:
    a, b = mlp(), mlp()
    acc_a = wb.Accumulator(a, sgd(a), steps=2)
    acc_b = wb.Accumulator(b, sgd(b), steps=3)
    for micro in wb.over(pieces(samples(7), [1] * 7), acc_a, acc_b):
        acc_a.backward(summed(a, micro), units=1)
        acc_b.backward(summed(b, micro), units=1)
    assert (acc_a.updates, acc_b.updates) == (4, 3)


def test_nesting_two_loops_on_one_model_is_refused() -> None:
    model = mlp()
    one = wb.Accumulator(model, sgd(model), steps=2)
    other = wb.Accumulator(model, sgd(model), steps=2)
    for _ in one.over([1, 2]):
        with pytest.raises(wb.errors.WindowError, match=r"over\(\) inside over\(\)"):
            other.over([1])
        break
    with pytest.raises(wb.errors.OptionError, match="same model in one"):
        wb.over([1], one, other)
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
    with pytest.raises(wb.errors.StateError, match="failed half way"):
        acc.state_dict()
    acc.discard()
    assert acc.backward(summed(model, batch), units=4) is None


def test_an_error_of_the_loader_comes_when_its_item_is_due() -> None:
    model, batch = mlp(), samples(6)

    def loader() -> Iterator[Any]:
        yield from pieces(batch, [3, 3])
        raise OSError("disk")

    acc = wb.Accumulator(model, sgd(model), steps=3)
    seen = 0
    with pytest.raises(OSError, match="disk"):
        for micro in acc.over(loader()):
            acc.backward(summed(model, micro), units=3)
            seen += 1
    assert seen == 2
    assert acc.micro_batches == 2


def test_data_loader_with_a_sampler_that_repeats_to_fill_a_rank() -> None:
    from torch.utils.data import DistributedSampler

    data = TensorDataset(torch.arange(7.0).double())
    seen = []
    for rank in range(2):
        model = nn.Linear(1, 1).double()
        sampler: Any = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        acc = wb.Accumulator(model, sgd(model), steps=2)
        for (x,) in acc.over(DataLoader(data, batch_size=2, sampler=sampler)):
            seen += x.tolist()
            acc.backward(model(x[:, None]).sum(), units=len(x))
    assert sorted(seen) == [0, 1, 2, 3, 4, 5, 6]
