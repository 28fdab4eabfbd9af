"""The one factor: normalise × unscale × clip; what is not finite; what is empty."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.support import (
    Seen,
    Whole,
    adamw,
    distance,
    grouped,
    mlp,
    pieces,
    samples,
    sgd,
    summed,
)


def window(model: nn.Module, acc: wb.Accumulator, batch: Any, sizes: list[int]) -> wb.Step:
    step = None
    for micro in acc.over(pieces(batch, sizes)):
        step = acc.backward(summed(model, micro), units=len(micro["y"]))
    assert step is not None
    return step


FUSED = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True),
}


@pytest.mark.parametrize("make", [sgd, adamw])
def test_float32_is_as_close_to_float64_as_the_undivided_batch(make: Any) -> None:
    errors = []
    for seed in range(8):
        torch.manual_seed(seed)
        double = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 4)).double()
        x, y = torch.randn(64, 20).double(), torch.randint(0, 4, (64,))
        truth = Whole(double, make)
        truth.step({"x": x, "y": y})
        single = copy.deepcopy(double).float()
        whole = Whole(single, make)
        whole.step({"x": x.float(), "y": y})
        optimizer = make(single)
        recorded = Seen(single, optimizer)
        acc = wb.Accumulator(single, optimizer, steps=5)
        window(single, acc, {"x": x.float(), "y": y}, [1, 20, 3, 30, 10])
        right = truth.seen.gradients[0]
        errors.append(
            (distance(recorded.gradients[0], right), distance(whole.seen.gradients[0], right))
        )
    ours, theirs = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0}, "clip_norm=0: must be a positive number"),
        ({"clip_norm": -1.0}, "must be a positive number"),
        ({"clip_norm": math.nan}, "must be a positive number"),
        ({"clip_norm": "1.0"}, "clip_norm='1.0': must be a positive number"),
        ({"clip_norm": [1.0, 2.0]}, "2 values for 1 parameter groups"),
        ({"clip_value": 0}, "clip_value=0: must be a positive number"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "together: give one"),
        ({"nonfinite": "ignore"}, "must be 'raise' or 'skip'"),
        ({"zero_units": None}, "must be 'raise' or 'skip'"),
    ],
)
def test_impossible_options_are_refused_at_construction(
    options: dict[str, Any], message: str
) -> None:
    model = mlp()
    with pytest.raises(wb.errors.OptionError, match=message):
        wb.Accumulator(model, sgd(model), steps=2, **grouped(options))


def poisoned(batch: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    return {"x": batch["x"].index_fill(0, torch.tensor([row]), math.nan), "y": batch["y"]}


@pytest.mark.parametrize("make", [sgd, adamw, FUSED["SGD"], FUSED["AdamW"]])
def test_not_finite_raises_and_leaves_everything_untouched(make: Any) -> None:
    model = mlp(dtype=torch.float32)
    good = samples(12, dtype=torch.float32)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    acc = wb.Accumulator(model, optimizer, steps=3, scheduler=scheduler)
    for prepared in (False, True):  # before and after the optimizer has state
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
        with pytest.raises(wb.errors.NonFiniteError, match="micro-batch 2 of 3") as caught:
            window(model, acc, poisoned(good, 5), [4, 4, 4])
        assert caught.value.micro_batch == 1
        after = (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert all(parameter.grad is None for parameter in model.parameters())
        if not prepared:
            window(model, acc, good, [6, 5, 1])
    assert acc.updates == 1


def test_skip_counts_and_goes_on() -> None:
    model = mlp()
    whole = Whole(model)
    good = samples(12)
    whole.step(good)
    acc = wb.Accumulator(model, sgd(model), steps=3, close=wb.Close(nonfinite="skip"))
    step = window(model, acc, poisoned(good, 0), [4, 4, 4])
    assert step.skipped is not None
    assert "micro-batch 1 of 3" in step.skipped
    window(model, acc, good, [4, 4, 4])
    assert (acc.updates, acc.skipped) == (1, 1)
    whole.assert_same(model)


def test_zero_units_are_an_error_or_skipped() -> None:
    model, batch = mlp(), samples(4)
    total = summed(model, batch) * 0
    acc = wb.Accumulator(model, sgd(model), steps=1)
    with pytest.raises(wb.errors.EmptyWindowError, match=r"zero units.*zero_units='skip'"):
        acc.backward(total, units=torch.tensor(0))
    assert acc.updates == 0
    acc = wb.Accumulator(model, sgd(model), steps=1, close=wb.Close(zero_units="skip"))
    step = acc.backward(summed(model, batch) * 0, units=0)
    assert step is not None
    assert step.skipped == "no units"
    assert (acc.updates, acc.skipped) == (0, 1)


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize("where", ["after each update", "after each micro-batch"])
@pytest.mark.parametrize("kind", ["lambda", "plateau"])
def test_a_scheduler_that_the_loop_steps_too_is_refused(where: str, kind: str) -> None:
    model, batch = mlp(), samples(8)
    optimizer = sgd(model)
    rates = torch.optim.lr_scheduler
    scheduler: Any = rates.LambdaLR(optimizer, lambda n: 0.5**n)
    if kind == "plateau":
        scheduler = rates.ReduceLROnPlateau(optimizer, patience=0)
    acc = wb.Accumulator(model, optimizer, steps=2, scheduler=scheduler)

    def loop() -> None:
        for _ in range(2):
            for micro in acc.over(pieces(batch, [5, 3])):
                step = acc.backward(summed(model, micro), units=len(micro["y"]))
                if step is not None or where == "after each micro-batch":
                    scheduler.step(*([1.0] if kind == "plateau" else []))

    with pytest.raises(wb.errors.WindowError, match=r"remove scheduler\.step|rate changed"):
        loop()
    assert acc.updates <= 1


def test_a_gradient_hook_runs_once_on_the_whole_gradient() -> None:
    model, batch = mlp(), samples(18)
    whole = Whole(model, clip_norm=0.02)

    def clamp(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-0.002, 0.002)  # not linear: per micro-batch it would be wrong

    for parameter in whole.model.parameters():
        parameter.register_hook(clamp)
    whole.step(batch)
    calls = []
    for parameter in model.parameters():
        parameter.register_hook(clamp)
        parameter.register_hook(lambda g: calls.append(g))
    acc = wb.Accumulator(model, sgd(model), steps=3, clip_norm=0.02)
    window(model, acc, batch, [1, 12, 5])
    whole.assert_same(model)
    assert len(calls) == 6
    model(batch["x"]).sum().backward()  # outside of a window the hooks are back
    assert len(calls) == 12
