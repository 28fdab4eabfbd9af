"""WholeBatch against the undivided batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
    grouped,
    loss,
    mlp,
    pieces,
    samples,
    sgd,
)


def count(micro: dict[str, torch.Tensor]) -> int:
    return len(micro["y"])


@pytest.mark.parametrize("micro_batch", [1, 5, 23, 100, "auto"])
@pytest.mark.parametrize("units", [None, count])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_same_update_as_the_undivided_batch(
    micro_batch: Any, units: Callable[..., int] | None, clip: float | None
) -> None:
    model, batch = mlp(), samples(24)
    whole = Whole(model, adamw, clip_norm=clip)
    optimizer = adamw(model)
    gradients = Seen(model, optimizer)
    train = wb.WholeBatch(
        model, optimizer, loss=loss, micro_batch=micro_batch, units=units, clip_norm=clip
    )
    for _ in range(3):
        value = whole.step(batch)
        step = train.step(batch)
        assert step.loss == pytest.approx(value, rel=1e-13)
    whole.assert_same(model, gradients, at_most=10 * EXACT)
    assert (train.updates, step.update) == (3, 3)
    assert step.units == 24.0


def test_terms_need_units_of_their_names() -> None:
    model, batch = mlp(), samples(20)

    def terms(model: nn.Module, micro: dict[str, torch.Tensor]) -> Any:
        out = model(micro["x"])
        main, size = wb.cross_entropy(out, micro["y"]), out.square().mean(1).sum()
        return wb.Loss.terms({"main": (main.total, main.units), "size": (size, len(out), 0.3)})

    stream = wb.Accumulator(model, sgd(model), steps=2)
    with pytest.raises(wb.errors.LossError, match=r"several terms.*WholeBatch\(units=\)"):
        stream.backward(terms(model, batch))
    with pytest.raises(wb.errors.LossError, match="a loss of several terms"):
        wb.WholeBatch(model, sgd(model), loss=terms, micro_batch=4).step(batch)
    with pytest.raises(wb.errors.LossError, match=r"\['main'\], but the loss has the terms"):
        wb.WholeBatch(
            model, sgd(model), loss=terms, units=lambda m: {"main": 1}, micro_batch=4
        ).step(batch)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("units", "counted"), [(lambda _: 1, "3"), (lambda micro: 1.03 * len(micro["x"]), "10.3")]
)
def test_units_that_count_something_else_are_an_error(units: Any, counted: str) -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    train = wb.WholeBatch(model, sgd(model), loss=loss, units=units, micro_batch=4)
    with pytest.raises(wb.errors.LossError, match=rf"counted {counted} units.*returned 10"):
        train.step(samples(10))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 0}, 'micro_batch=0: must be a positive number of samples, "auto"'),
        ({"micro_batch": True}, "micro_batch=True"),
        ({"micro_batch": "4096"}, "micro_batch='4096'"),
        ({"loss": 3}, "loss=3: must be a function"),
        ({"units": 3}, "units=3: must be a function"),
        ({"precision": "int8"}, "precision='int8'"),
        ({"clip_norm": -1}, "clip_norm=-1"),
        ({"batchnorm": "wrong"}, 'batchnorm="wrong"'),
    ],
)
def test_impossible_options_are_refused_at_construction(
    options: dict[str, Any], message: str
) -> None:
    model = mlp()
    with pytest.raises(wb.errors.OptionError, match=message):
        wb.WholeBatch(model, sgd(model), **grouped({"loss": loss, **options}))


def test_a_bare_scalar_is_refused_before_any_gradient() -> None:
    model = mlp()
    train = wb.WholeBatch(model, sgd(model), loss=lambda m, b: loss(m, b).total, micro_batch=4)
    with pytest.raises(wb.errors.LossError, match="is this scalar a sum or a mean"):
        train.step(samples(8))
    assert all(parameter.grad is None for parameter in model.parameters())


class Overflows(torch.autograd.Function):
    """Finite forward, infinite gradient where the input is above 90."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0].masked_fill(x > 90, float("inf"))


def test_a_finite_loss_with_an_infinite_gradient_makes_no_update() -> None:
    model, batch = mlp(), samples(10)
    batch["marker"] = torch.zeros(10, dtype=torch.float64)
    batch["marker"][6] = 99.0

    def risky(model: nn.Module, micro: dict[str, torch.Tensor]) -> wb.Loss:
        out = model(micro["x"])
        shifted = Overflows.apply(out + micro["marker"][:, None])
        return wb.Loss(functional.cross_entropy(shifted, micro["y"], reduction="sum"), len(out))

    before = copy.deepcopy(model.state_dict())
    train = wb.WholeBatch(model, sgd(model), loss=risky, micro_batch=3)
    state = torch.get_rng_state()
    with pytest.raises(
        wb.errors.NonFiniteError, match="the losses are finite but the gradients are not"
    ):
        train.step(batch)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def with_dropout() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 32), nn.Dropout(0.5), nn.Linear(32, 3)).double()


@pytest.mark.parametrize("fits", [1, 3, 5])
def test_auto_recovers_from_a_real_out_of_memory_as_if_split_so_from_the_start(fits: int) -> None:
    batch, sizes = samples(20), []

    def limited(model: nn.Module, micro: dict[str, torch.Tensor]) -> wb.Loss:
        out = model(micro["x"])  # draws dropout before it fails
        if len(out) > fits:
            sizes.clear()
            raise torch.OutOfMemoryError("tried to allocate")
        sizes.append(len(out))
        return wb.cross_entropy(out, micro["y"])

    model = with_dropout()
    torch.manual_seed(11)
    train = wb.WholeBatch(model, sgd(model), loss=limited, micro_batch="auto", audit=False)
    split = []
    for _ in range(2):
        sizes.clear()
        train.step(batch)
        split.append(list(sizes))
    assert [sum(window) for window in split] == [20, 20]
    assert train.recoveries > 0
    assert max(split[1]) == split[1][0] > fits / 2  # remembered, not found again

    reference = with_dropout()
    torch.manual_seed(11)
    acc = wb.Accumulator(reference, sgd(reference), steps={0: len(split[0]), 1: len(split[1])})
    for window in split:
        for micro in acc.over(pieces(batch, window)):
            acc.backward(limited(reference, micro))
    assert acc.updates == 2
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_auto_gives_up_when_one_sample_does_not_fit() -> None:
    model = mlp()

    def never(model: nn.Module, micro: Any) -> wb.Loss:
        raise torch.OutOfMemoryError("tried to allocate")

    with pytest.raises(torch.OutOfMemoryError):
        wb.WholeBatch(model, sgd(model), loss=never).step(samples(4))
