"""A loss that is divided by the number of steps is warned of at every entry point."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.support import Whole, mean, mlp, pieces, samples, sgd, summed
from wholebatch.coupled.last_reduction import last_reductions
from wholebatch.errors import LossError

STEPS = 4
WARNED = "and 4 is the number of steps"
DIVIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "an operator": lambda loss: loss / STEPS,
    "a method": lambda loss: loss.div(STEPS),
    "in place": lambda loss: loss.div_(STEPS),
    "a float": lambda loss: loss / 4.0,
    "a function": lambda loss: torch.true_divide(loss, STEPS),
    "above a weight": lambda loss: 0.1 * loss / STEPS,
    "beside another mean": lambda loss: (loss + 0.1 * loss) / STEPS,
}
INVERSE: dict[str, Callable[[Tensor], Tensor]] = {
    "a product": lambda loss: loss * (1 / STEPS),
    "a factor before it": lambda loss: 0.25 * loss,
}


def in_accumulator(loss: Callable[[nn.Module, Any], wb.Loss], batch: Any, **options: Any) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=STEPS, **options)
    for micro in pieces(batch, [4, 4, 4, 4]):
        acc.backward(loss(model, micro))


def in_run(loss: Callable[[nn.Module, Any], wb.Loss], batch: Any, **options: Any) -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=STEPS, **options)
    of_micro = partial(loss, model)
    for micro in pieces(batch, [4, 4, 4, 4]):
        acc.run(of_micro, micro)


def in_whole_batch(loss: Callable[[nn.Module, Any], wb.Loss], batch: Any, **options: Any) -> None:
    model = mlp()
    wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4, **options).step(batch)


ENTRY_POINTS = {"backward": in_accumulator, "run": in_run, "WholeBatch": in_whole_batch}


def scaled(change: Callable[[Tensor], Tensor], units: Any = len) -> Callable[..., wb.Loss]:
    def loss(model: nn.Module, micro: Any) -> wb.Loss:
        return wb.mean_loss(change(mean(model, micro)), units(micro["y"]))

    return loss


@pytest.mark.parametrize("units", [len, lambda y: torch.tensor(len(y))], ids=["number", "tensor"])
@pytest.mark.parametrize("change", DIVIDED.values(), ids=DIVIDED)
@pytest.mark.parametrize("run", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_a_division_by_the_steps_is_warned_of_once(run: Any, change: Any, units: Any) -> None:
    # Micro-batches of 4 in 4 steps: the number is also a size in the graph, and the units.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(scaled(change, units), samples(16))
    assert sum(WARNED in str(one.message) for one in caught) == 1


@pytest.mark.parametrize("change", INVERSE.values(), ids=INVERSE)
@pytest.mark.parametrize("run", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_a_product_with_the_inverse_is_warned_of_once(run: Any, change: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(scaled(change), samples(16))
    assert sum(WARNED in str(one.message) for one in caught) == 1


@pytest.mark.parametrize("run", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_audit_false_takes_it_as_it_is(run: Any) -> None:
    run(scaled(DIVIDED["an operator"]), samples(16), audit=False)


def test_a_short_window_of_as_many_steps() -> None:
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=8)
    for micro in pieces(samples(16), [4, 4, 4, 4]):
        acc.backward(mean=mean(model, micro) / STEPS, units=4)
    with pytest.warns(UserWarning, match=WARNED):
        acc.flush()


def thirds(micro: Any) -> Tensor:
    return torch.full((len(micro["y"]), 3), 1 / 3, dtype=torch.float64)


RIGHT: dict[str, Callable[[nn.Module, Any], wb.Loss]] = {
    "a sum by the features": lambda model, micro: wb.Loss(
        (model(micro["x"])[:, :1].repeat(1, 4) - 1).square().sum() / 4, len(micro["y"])
    ),
    "a sum by the samples": lambda model, micro: wb.mean_loss(
        summed(model, micro) / len(micro["y"]), len(micro["y"])
    ),
    "batchmean": lambda model, micro: wb.mean_loss(
        F.kl_div(model(micro["x"]).log_softmax(-1), thirds(micro), reduction="batchmean"),
        len(micro["y"]),
    ),
    "one term of two": lambda model, micro: wb.mean_loss(
        mean(model, micro) / 4 + model(micro["x"]).square().mean(), len(micro["y"])
    ),
    "another number": lambda model, micro: wb.mean_loss(mean(model, micro) / 3, len(micro["y"])),
    "a quarter of a unit": lambda model, micro: wb.mean_loss(
        mean(model, micro), len(micro["y"]) / 16
    ),
    "a mean made a sum": lambda model, micro: wb.Loss(
        model(micro["x"])[:, :1].repeat(1, 4).square().mean() * (4 * len(micro["y"])) / 4,
        len(micro["y"]),
    ),
}


@pytest.mark.parametrize("loss", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("run", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_other_divisions_are_right(run: Any, loss: Any) -> None:
    run(loss, samples(16))


def test_an_average_of_as_many_terms_is_only_warned_of() -> None:
    def heads(model: nn.Module, micro: Any) -> wb.Loss:
        losses = [mean(model, micro) * 0.9**place for place in range(4)]
        return wb.mean_loss((losses[0] + losses[1] + losses[2] + losses[3]) / 4, len(micro["y"]))

    with pytest.warns(UserWarning, match=WARNED):
        in_whole_batch(heads, samples(16))


def test_a_sum_over_as_many_classes_as_steps_is_warned_of_at_the_line_of_the_loop() -> None:
    def backward() -> None:
        model = nn.Linear(3, STEPS)
        acc = wb.Accumulator(model, sgd(model), steps=STEPS)
        total = F.cross_entropy(model(torch.ones(5, 3)), torch.arange(5) % 4, reduction="sum")
        acc.backward(total / STEPS, units=5)

    with pytest.warns(UserWarning, match=WARNED) as caught:
        backward()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "this loss is divided by 4")  # as the message says
        backward()


def test_the_weight_that_is_meant_is_exact() -> None:
    whole = Whole(mlp(), loss=lambda model, batch: mean(model, batch) * 0.25)
    whole.step(samples(16))
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=STEPS)
    first, *others = pieces(samples(16), [7, 2, 4, 3])
    with pytest.warns(UserWarning, match=WARNED):
        acc.backward(mean=mean(model, first) * 0.25, units=7)
    for micro in others:
        acc.backward(mean=mean(model, micro) * 0.25, units=len(micro["y"]))
    whole.assert_same(model)


def test_reductions_are_read_from_the_graph() -> None:
    logits = torch.randn(6, 3, requires_grad=True)
    labels = torch.zeros(6, dtype=torch.long)
    smoothed = F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert {one.kind for one in last_reductions(smoothed)} == {"mean", "sum"}
    mse = last_reductions(F.mse_loss(logits, logits.detach()))
    assert [(one.kind, one.function) for one in mse] == [("mean", "mse_loss")]
    assert [one.kind for one in last_reductions(logits.exp().sum().log())] == ["unknown"]
    assert last_reductions(torch.zeros(())) == []


# --------------------------------------------------------------------- a mean over no units


def focal(model: nn.Module, micro: Any) -> Tensor:
    """Return a detector's mean: the sum over all anchors by the number of those with an object."""
    positives = (micro["y"] == 2).sum()
    return model(micro["x"]).square().sum() / positives.clamp(min=1)


def without_positives() -> Any:
    batch = samples(8)
    return {**batch, "y": batch["y"].clamp(max=1)}


@pytest.mark.parametrize("units", [0, 0.0, torch.tensor(0)], ids=["int", "float", "tensor"])
def test_a_mean_over_no_units_that_is_not_zero_is_refused(units: Any) -> None:
    model, batch = mlp(), without_positives()
    with pytest.raises(LossError, match=r"over units=0: it would be multiplied by 0 and lost"):
        wb.mean_loss(focal(model, batch), units)
    acc = wb.Accumulator(model, sgd(model), steps=2)
    with pytest.raises(LossError, match=r"over units=0"):
        acc.backward(mean=focal(model, batch), units=units)


def test_where_the_units_cannot_be_read_such_a_loss_is_nan() -> None:
    def loss(weight: Tensor, units: Tensor) -> Tensor:
        return wb.mean_loss(weight * 2, units).total

    weights, units = torch.tensor([3.0, 3.0, 0.0]), torch.tensor([5.0, 0.0, 0.0])
    made = torch.func.vmap(torch.func.grad(loss))(weights, units)
    assert made[0] == 10.0
    assert made[1].isnan()
    assert made[2] == 0.0


def test_sums_over_the_objects_are_exact() -> None:
    def total(model: nn.Module, micro: Any) -> wb.Loss:
        return wb.Loss(model(micro["x"]).square().sum(), (micro["y"] == 2).sum())

    batch = samples(16)
    batch["y"][:5] = 0  # the first micro-batch has no object
    whole = Whole(mlp(), loss=focal)
    whole.step(batch)
    model = mlp()
    acc = wb.Accumulator(model, sgd(model), steps=3)
    for micro in pieces(batch, [5, 4, 7]):
        acc.backward(total(model, micro))
    whole.assert_same(model)
