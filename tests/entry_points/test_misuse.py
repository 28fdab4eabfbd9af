"""Calls that cannot be right: one clear line before work begins, and nothing is lost."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.support import EXACT, Whole, grouped, loss, mlp, samples, sgd, summed
from wholebatch import errors
from wholebatch.errors import (
    LossError,
    OptionError,
    SplitError,
    UnsupportedError,
    WholebatchError,
    WindowError,
)
from wholebatch.losses.loss import check_units

BATCH = samples(12)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
    ).double()


def refused(kind: type[Exception], match: str, batch: Any = BATCH, **options: Any) -> None:
    """A step raises this error, and parameters, buffers, gradients and generators stay."""
    model = network()
    train = wb.WholeBatch(
        model,
        sgd(model),
        **grouped({"loss": loss, "micro_batch": 4, "batchnorm": "allow", **options}),
    )
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(9)
    generator = torch.get_rng_state()
    with pytest.raises(kind, match=match) as caught:
        train.step(batch)
    assert "\n" not in str(caught.value)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())
    assert train.updates == 0


BATCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "csr": (lambda: {**BATCH, "x": BATCH["x"].to_sparse_csr()}, "'x' is a torch.sparse_csr tensor"),
    "nested": (
        lambda: {**BATCH, "x": torch.nested.nested_tensor([torch.ones(3, 5), torch.ones(2, 5)])},
        r"'x' is a nested \(jagged\) tensor",
    ),
    "empty": (lambda: {name: leaf[:0] for name, leaf in BATCH.items()}, "has no samples"),
    "nothing": (dict, "has no tensor with a first dimension"),
    "generator": (lambda: (batch for batch in [BATCH]), r"the batch \(a generator\) has no tensor"),
    "None": (lambda: None, r"the batch \(a NoneType\) has no tensor"),
}


@pytest.mark.filterwarnings("ignore:.*(CSR|nested)")
@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str) -> None:
    make, match = BATCHES[name]
    refused(SplitError, match, make())


@pytest.mark.parametrize(
    "units",
    [
        10**400,
        Fraction(10**400),
        -1,
        float("nan"),
        float("inf"),
        True,
        None,
        "3",
        1 + 2j,
        Decimal(4),
        torch.tensor(True),
        torch.tensor([1.0, 2.0]),
        torch.tensor(1j),
    ],
    ids=lambda u: repr(u)[:12],
)
def test_units_that_are_no_number(units: Any) -> None:
    refused(LossError, "^units", units=lambda micro: units)
    with pytest.raises(LossError, match=r"^units") as caught:
        check_units(units)
    assert len(str(caught.value)) < 200
    acc = wb.Accumulator(model := mlp(), sgd(model), steps=2)
    with pytest.raises(LossError, match="units"):
        acc.backward(summed(model, BATCH), units=units)


@pytest.mark.parametrize("units", [np.float32(4), np.float64(4), np.int64(4), Fraction(4), 4.0])
def test_units_that_are_numbers(units: Any) -> None:
    model = mlp()
    whole = Whole(model)
    whole.step(BATCH)
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4, units=lambda m: units)
    assert train.step(BATCH).units == 12.0
    whole.assert_same(model, at_most=EXACT)
    assert type(check_units(units)) in (int, float)


@pytest.mark.parametrize("returned", [None, 1.5, (1, 2), torch.tensor(1.0)], ids=str)
def test_losses_that_are_none(returned: Any) -> None:
    def wrong(model: nn.Module, micro: Any) -> Any:
        model(micro["x"])  # moves statistics, and draws masks
        return returned

    refused(LossError, "the loss function returned", loss=wrong)


def test_models_and_optimizers_that_do_not_belong_together() -> None:
    model, other = mlp(), mlp()
    loose = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(UnsupportedError, match="Identity has no parameters"):
        wb.WholeBatch(nn.Identity(), loose, loss=loss)
    with pytest.raises(UnsupportedError, match="a model without parameters: nothing to train"):
        wb.WholeBatch(nn.Identity(), None, loss=loss)
    for make in (
        lambda: wb.WholeBatch(model, sgd(other), loss=loss),
        lambda: wb.Accumulator(model, sgd(other), steps=2),
    ):
        with pytest.raises(UnsupportedError, match="none of the optimizer's 6 parameters"):
            make()


# ------------------------------------------------------------------ one call at a time


def test_a_step_in_a_second_thread_is_refused() -> None:
    model = mlp()
    whole = Whole(model)
    whole.step(BATCH)
    inside, go_on = threading.Event(), threading.Event()

    def waits(model: nn.Module, micro: Any) -> wb.Loss:
        inside.set()
        assert go_on.wait(30)
        return loss(model, micro)

    train = wb.WholeBatch(model, sgd(model), loss=waits, micro_batch=6, audit=False)
    thread = threading.Thread(target=train.step, args=(BATCH,))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(WindowError, match="another thread"):
        train.step(BATCH)
    go_on.set()
    thread.join(30)
    assert train.updates == 1
    whole.assert_same(model)
    train.step(BATCH)  # one after the other is fine
    assert train.updates == 2


# ------------------------------------------------------------------ pickle and copy

ERRORS = [getattr(errors, name) for name in errors.__all__]


def instance(kind: Any) -> WholebatchError:
    if kind is errors.NonFiniteError:
        return kind("loss", micro_batch=3)  # type: ignore[no-any-return]
    if kind is errors.MissingExtraError:
        return kind("wandb", "logging", "the report")  # type: ignore[no-any-return]
    return kind("what was given: what is allowed")  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("way", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy, copy.copy])
def test_errors_travel(kind: Any, way: Any) -> None:
    error = instance(kind)
    error.add_note("of rank 2")
    again = way(error)
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("way", [pickle.dumps, copy.deepcopy])
def test_what_holds_a_window_says_what_to_save_instead(way: Any) -> None:
    model = mlp()
    for holder in (
        wb.WholeBatch(model, sgd(model), loss=loss),
        wb.Accumulator(model, sgd(model), steps=2),
    ):
        with pytest.raises(UnsupportedError, match=r"cannot be pickled or copied.*state_dict\(\)"):
            way(holder)


def test_losses_and_loaders_that_are_none() -> None:
    model = mlp()
    for wrong in (None, nn.CrossEntropyLoss()):
        with pytest.raises(OptionError, match="must be a function of the model and a micro-batch"):
            wb.WholeBatch(model, sgd(model), loss=wrong, micro_batch=4)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="must be a function of the model and a micro-batch"):
            wb.verify(model, wrong, BATCH)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="must be a loader"):
        next(iter(wb.Accumulator(model, sgd(model), steps=2).over(5)))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_where_no_gradient_can_be_made(mode: Any) -> None:
    with mode():
        refused(WindowError, "under torch.no_grad")


@pytest.mark.parametrize(
    ("make", "option", "message"),
    [
        (wb.WholeBatch, {"steps": 4}, r"WholeBatch\(steps=4\): give the whole batch and micro_ba"),
        (wb.WholeBatch, {"microbatch": 4}, "did you mean micro_batch=?"),
        (wb.WholeBatch, {"cheese": 1}, "no such option: the options are"),
        (lambda *_, **options: wb.Close(**options), {"clip_valu": 1}, "did you mean clip_value="),
        (wb.Accumulator, {"step": 4}, "did you mean steps=?"),
        (wb.Accumulator, {"micro_batch": 4}, "WholeBatch has micro_batch="),
        (wb.Accumulator, {"steps": 2, "precision": "bf16"}, "under torch.autocast"),
        (wb.Accumulator, {"steps": 2, "loss": len}, "give backward.. the loss of each"),
        (wb.Accumulator, {"steps": 2, "nonfinite": "skip"}, r"close=wb.Close\(nonfinite=...\)"),
    ],
)
def test_an_unknown_option_is_answered_with_what_was_meant(
    make: Any, option: Any, message: str
) -> None:
    model = mlp()
    with pytest.raises(wb.errors.OptionError, match=message):
        make(model, sgd(model), **option)
