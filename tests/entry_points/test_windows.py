"""Windows of own loops: their tail, their size at run time, what opens them, what fails in them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import Whole, mlp, pieces, samples, sgd, summed
from wholebatch.errors import LossError, WindowError


def joined(parts: list[Any]) -> Any:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# ---------------------------------------------------------------- nothing is read ahead


def ring(parts: list[Any]) -> Iterator[Any]:
    """Fill one buffer again and again, as DALI and FFCV do."""
    buffer = {name: torch.empty_like(value) for name, value in parts[0].items()}
    for part in parts:
        for name, value in part.items():
            buffer[name].copy_(value)
        yield buffer


@pytest.mark.parametrize("number", [4, 6])
def test_a_loader_may_use_its_buffer_again(number: int) -> None:
    model, parts = mlp(), pieces(samples(2 * number), [2] * number)
    whole = Whole(model)
    for start in range(0, number, 4):
        whole.step(joined(parts[start : start + 4]))
    acc = wb.Accumulator(model, sgd(model), steps=4)
    for micro in acc.over(ring(parts)):
        acc.backward(summed(model, micro), units=2)
    whole.assert_same(model)


def test_the_tail_closes_when_the_loader_has_ended() -> None:
    model, parts = mlp(), pieces(samples(9), [2, 3, 4])
    whole = Whole(model)
    whole.step(joined(parts[:2]))
    whole.step(parts[2])
    acc = wb.Accumulator(model, sgd(model), steps=2)
    steps = [acc.backward(summed(model, p), units=len(p["y"])) for p in acc.over(parts)]
    assert [step is not None for step in steps] == [False, True, False]
    assert acc.last_step is not None
    assert (acc.last_step.update, acc.last_step.micro_batches, acc.last_step.units) == (2, 1, 4)
    whole.assert_same(model)


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


def test_an_announcement_may_be_made_again_before_the_first_loss() -> None:
    model, parts = mlp(), pieces(samples(6), [2, 4])
    acc = wb.Accumulator(model, sgd(model), steps=2)
    acc.announce({"a": 5})
    for index, micro in enumerate(acc.over(parts)):
        if not index:
            acc.announce({"a": 6})
        acc.backward(wb.Loss.terms({"a": (summed(model, micro), len(micro["y"]))}))
    assert acc.last_step is not None
    assert acc.last_step.units == 6


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


def two_terms(model: nn.Module, micro: Any) -> Any:
    out = model(micro["x"])
    fit = F.cross_entropy(out, micro["y"], reduction="sum")
    return wb.Loss.terms(
        {
            "fit": (fit, len(micro["y"])),
            "size": (out.square().sum(), out.numel(), torch.tensor(0.3, dtype=torch.float64)),
        }
    )


@pytest.mark.parametrize("execute", ["eager", "auto"])
def test_run_takes_a_loss_of_several_terms(execute: Any) -> None:
    model, parts = mlp(), pieces(samples(9), [2, 3, 4])
    batch = joined(parts)
    reference = mlp()
    reference.load_state_dict(model.state_dict())
    out = reference(batch["x"])
    (F.cross_entropy(out, batch["y"]) + 0.3 * out.square().mean()).backward()
    sgd(reference).step()
    acc = wb.Accumulator(model, sgd(model), steps=3, execute=execute)

    def loss(micro: Any) -> Any:
        return two_terms(model, micro)

    with pytest.raises(LossError, match="announce"):
        acc.run(loss, parts[0])
    acc.announce({"fit": 9, "size": 9 * out.shape[1]})
    for micro in parts:
        step = acc.run(loss, micro)
    assert step is not None
    assert step.terms.keys() == {"fit", "size"}
    assert isinstance(acc.last_loss, wb.losses.loss.Terms) or acc.last_loss is not None
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", ["over", "window", "run", "whole"])
def test_what_a_window_does_before_its_first_forward(way: str) -> None:
    """A decoder is kept at unit norm, and the rate is set by hand."""
    model, batch = mlp(), samples(12)
    parts = pieces(batch, [3] * 4)
    reference = mlp()
    reference.load_state_dict(model.state_dict())
    optimizer, other = sgd(model), sgd(reference)
    calls: list[int] = []

    def prepare(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            model[0].weight.div_(model[0].weight.norm(dim=0))
        optimizer.param_groups[0]["lr"] *= 0.5

    def on_open() -> None:
        calls.append(1)
        prepare(model, optimizer)

    close = wb.Close(on_open=on_open)
    if way == "whole":
        train = wb.WholeBatch(
            model,
            optimizer,
            loss=lambda m, b: wb.cross_entropy(m(b["x"]), b["y"]),
            micro_batch=2,
            close=close,
        )
        for start in (0, 2):
            train.step(joined(parts[start : start + 2]))
    else:
        acc = wb.Accumulator(model, optimizer, steps=2, close=close)
        if way == "over":
            for micro in acc.over(parts):
                acc.backward(summed(model, micro), units=3)
        elif way == "window":
            for start in (0, 2):
                for micro in acc.window(parts[start : start + 2]):
                    acc.backward(summed(model, micro), units=3)
        else:
            for micro in parts:
                acc.run(lambda b: wb.cross_entropy(model(b["x"]), b["y"]), micro)
        with pytest.raises(WindowError, match="whose first forward has run already"):
            acc.backward(summed(model, parts[0]), units=3)
    assert len(calls) == 2
    for start in (0, 2):
        prepare(reference, other)
        half = joined(parts[start : start + 2])
        other.zero_grad()
        F.cross_entropy(reference(half["x"]), half["y"]).backward()
        other.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.conj()


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_a_gradient_that_is_a_lazy_conjugate(clip_norm: float | None) -> None:
    model, reference = Conjugated(), Conjugated()
    x = torch.randn(12, 5, dtype=torch.complex128)
    acc = wb.Accumulator(model, sgd(model), steps=3, clip_norm=clip_norm)
    for part in x.split([5, 4, 3]):
        acc.backward(model(part).abs().square().sum(), units=len(part))
    (reference(x).abs().square().sum() / 12).backward()
    assert reference.weight.grad is not None
    reference.weight.grad = reference.weight.grad.resolve_conj()  # torch clips no other
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
    sgd(reference).step()
    assert torch.allclose(model.weight, reference.weight, rtol=1e-12, atol=1e-14)
