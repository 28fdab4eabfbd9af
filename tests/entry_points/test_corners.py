"""Corners where an update was wrong, or failed, and nobody was told why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.support import EXACT, distance, mlp, pieces, samples, sgd

Batch = dict[str, Tensor]
SIZES = (4, 1, 5, 3)


def looped(
    model: nn.Module, loss: Callable[[Any, Batch], Tensor], units: Any = None
) -> tuple[float, float]:
    """Train two windows in a loop; return how far parameters and buffers are from whole batches."""
    whole = copy.deepcopy(model)
    optimizer = sgd(whole)
    acc = wb.Accumulator(model, sgd(model), steps=len(SIZES))
    for seed in range(2):
        batch = {name: leaf[seed : seed + sum(SIZES)] for name, leaf in samples(20).items()}
        for micro in acc.over(pieces(batch, SIZES)):
            number = len(micro["y"]) if units is None else units(model, micro)
            acc.backward(mean=loss(model, micro), units=number)
        optimizer.zero_grad()
        loss(whole, batch).backward()
        optimizer.step()
    buffers = list(model.buffers()), list(whole.buffers())
    return distance(model.parameters(), whole.parameters()), distance(*buffers)


def by_confidence(model: nn.Module, micro: Batch) -> Tensor:
    out = model(micro["x"])
    losses, weights = functional.cross_entropy(out, micro["y"], reduction="none"), confidence(out)
    return (losses * weights).sum() / weights.sum()


def confidence(out: Tensor) -> Tensor:
    return out[:, 0].sigmoid()


def step_of(model: nn.Module, **options: Any) -> Callable[[Any], wb.Step]:
    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        return wb.cross_entropy(model(micro["x"]), micro["y"])

    return wb.WholeBatch(model, sgd(model), **{"loss": loss, "micro_batch": 4, **options}).step


def test_units_with_a_gradient_are_refused() -> None:
    def weighted(model: nn.Module, micro: Batch) -> wb.Loss:
        out = model(micro["x"])
        losses = functional.cross_entropy(out, micro["y"], reduction="none")
        return wb.Loss((losses * confidence(out)).sum(), confidence(out).sum())

    def count(model: nn.Module, micro: Batch) -> Tensor:
        return confidence(model(micro["x"])).sum()

    with pytest.raises(wb.errors.LossError, match=r"units require a gradient.*units\.detach\(\)"):
        looped(mlp(), by_confidence, count)
    with pytest.raises(wb.errors.LossError, match=r"units require a gradient.*units\.detach\(\)"):
        step_of(mlp(), loss=weighted)(samples(9))


def test_weights_that_are_trained_are_exact_by_coupled() -> None:
    model = mlp()
    whole, batch = copy.deepcopy(model), samples(11)

    def encode(model: nn.Module, micro: Batch) -> dict[str, Tensor]:
        return {"out": model(micro["x"]), "y": micro["y"]}

    def loss(all: dict[str, Tensor]) -> wb.Loss:
        return wb.Loss(by_confidence(lambda x: x, {"x": all["out"], "y": all["y"]}), 1)  # type: ignore[arg-type]

    step_of(model, loss=wb.Coupled(encode, loss))(batch)
    by_confidence(whole, batch).backward()
    sgd(whole).step()
    assert distance(model.parameters(), whole.parameters()) < EXACT


def each(model: nn.Module, micro: Batch) -> Tensor:
    return functional.cross_entropy(model(micro["x"]), micro["y"], reduction="none")


def in_groups(size: int) -> Callable[[nn.Module, Batch], wb.Loss]:
    """Return a loss that compares neighbours, in groups of `size`."""

    def loss(model: nn.Module, micro: Batch) -> wb.Loss:
        losses = each(model, micro)
        whole = len(losses) // size * size
        return wb.Loss(losses.sum() + losses[:whole].view(-1, size).prod(1).sum(), len(losses))

    return loss


@pytest.mark.parametrize(("size", "micro"), [(2, 9), (4, 18)])
def test_neighbours_that_a_micro_batch_cuts_are_refused(size: int, micro: int) -> None:
    with pytest.raises(wb.errors.UnsupportedError, match="compares samples"):
        step_of(mlp(), loss=in_groups(size), micro_batch=micro)(samples(3 * micro))


def two_windows(loss: Callable[[Any, Batch], Tensor], micro: int) -> None:
    """Make two steps of 48 samples, whose loss is the sum of a micro-batch."""

    def total(model: nn.Module, batch: Batch) -> wb.Loss:
        return wb.Loss(loss(model, batch), len(batch["y"]))

    step = step_of(mlp(), loss=total, micro_batch=micro)
    for _ in range(2):
        step(samples(48))


AMONG_MANY: dict[str, Callable[[Any, Batch], Tensor]] = {
    "the largest 20": lambda m, b: each(m, b).topk(min(20, len(b["y"]))).values.sum(),
    "a clamped sum": lambda m, b: each(m, b).sum().clamp(max=15.0),
    "a capacity of 12": lambda m, b: each(m, b)[:12].sum(),
    "pairs far apart": lambda m, b: each(m, b).sum() + each(m, b)[::9].prod(),
}


@pytest.mark.parametrize("name", AMONG_MANY)
@pytest.mark.parametrize("micro", [24, 23, 16])
def test_what_shows_only_among_the_samples_of_a_micro_batch_is_refused_in_window_two(
    name: str, micro: int
) -> None:
    if (name, micro) == ("the largest 20", 16):  # 16 samples have no 20 to choose from
        return
    with pytest.raises(wb.errors.WholebatchError, match="micro-batches cannot give the update"):
        two_windows(AMONG_MANY[name], micro)


class Bent(torch.autograd.Function):
    """Drops gradients below a size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.where(gradients[0].abs() > 1e-3, gradients[0], 0.0)


def test_small_gradients_that_a_function_drops_are_found() -> None:
    def loss(model: Any, micro: Batch) -> wb.Loss:
        hidden = Bent.apply(model[:2](micro["x"]))
        return wb.cross_entropy(model[2:](hidden), micro["y"])

    with pytest.raises(wb.errors.UnsupportedError, match="its gradient is not"):
        step_of(mlp(), loss=loss)(samples(13))
