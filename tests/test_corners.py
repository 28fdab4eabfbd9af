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
from tests.support import EXACT, distance, mean, mlp, pieces, samples, sgd

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
    found = list(model.buffers()), list(whole.buffers())
    return distance(model.parameters(), whole.parameters()), distance(*found)


class Carried(nn.Module):
    """A cell that keeps its last output, with its graph, and begins with it the next time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.cell, self.last = nn.GRUCell(5, 3).double(), None

    def forward(self, x: Tensor) -> Tensor:
        start = None if self.last is None else self.last.detach()[:1].expand(len(x), 3)
        self.last = self.cell(x, start)
        out: Tensor = self.last
        return out


def by_confidence(model: nn.Module, micro: Batch) -> Tensor:
    out = model(micro["x"])
    losses, weights = functional.cross_entropy(out, micro["y"], reduction="none"), confidence(out)
    return (losses * weights).sum() / weights.sum()


def confidence(out: Tensor) -> Tensor:
    return out[:, 0].sigmoid()


def test_an_output_that_a_model_keeps_for_its_next_call_is_found() -> None:
    with pytest.raises(wb.errors.UnsupportedError, match=r"last \(Carried\): moves once per"):
        looped(Carried(), mean)
    with pytest.raises(wb.errors.UnsupportedError, match=r"last \(Carried\): moves once per"):
        model = Carried()
        step_of(model)(samples(9))


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


KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda loss: (loss - 1.2).relu(),
    "clamp": lambda loss: loss.clamp(max=0.9),
    "flooding": lambda loss: (loss - 2.0).abs() + 2.0,
    "maximum": lambda loss: torch.maximum(loss - 1.2, torch.zeros(()).double()),
    "the larger of two": lambda loss: torch.maximum(loss, 2.0 * loss.square()),
}


@pytest.mark.parametrize("name", KINKS)
def test_a_loop_refuses_a_mean_that_is_clamped(name: str) -> None:
    with pytest.raises(wb.errors.LossError, match="clamps the sum or mean of its micro-batch"):
        looped(mlp(), lambda model, micro: KINKS[name](mean(model, micro)))


def test_a_clamp_that_changes_nothing_is_exact_and_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    off, _ = looped(mlp(), lambda model, micro: mean(model, micro).clamp(max=100.0))
    assert off < EXACT
    assert caplog.text.count("the sum or mean of a micro-batch is clamped") == 1


def test_clamps_of_single_samples_and_of_weights_are_exact(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def each(model: nn.Module, micro: Batch) -> Tensor:
        return (1 - model(micro["x"])[:, 0]).relu().mean()

    def in_a_loop(model: nn.Module, micro: Batch) -> Tensor:
        losses = [(1 - model(x[None])[:, :2].sum()).relu() for x in micro["x"]]
        return torch.stack(losses).mean()

    def with_penalty(model: Any, micro: Batch) -> Tensor:
        return mean(model, micro) + 0.1 * model[0].weight.sum().abs()

    for loss in (each, in_a_loop, with_penalty):
        off, _ = looped(mlp(), loss)
        assert off < EXACT, loss
    assert "clamped" not in caplog.text


def test_running_statistics_of_an_instance_norm_move_once_per_window_in_a_loop() -> None:
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    layers = (nn.Linear(5, 6), nn.Unflatten(1, (2, 3)), norm, nn.Flatten(), nn.Linear(6, 3))
    assert max(looped(nn.Sequential(*layers).double(), mean)) < EXACT


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


@pytest.mark.parametrize("gradients", ["device", "host", "release"])
def test_complex_parameters_with_gradients_kept_elsewhere(gradients: Any) -> None:
    model, batch = Complex(), samples(11)
    whole = copy.deepcopy(model)
    clip = None if gradients == "release" else 0.01
    memory, close = wb.Memory(gradients=gradients), wb.Close(nonfinite="skip")
    options: dict[str, Any] = {"memory": memory, "close": close, "clip_norm": clip}
    step_of(model, units=lambda micro: len(micro["y"]), **options)(batch)
    mean(whole, batch).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(whole.parameters(), clip)
    sgd(whole).step()
    ours, theirs = torch.view_as_real(model.weight), torch.view_as_real(whole.weight)
    assert distance([ours], [theirs]) < EXACT


def test_a_window_that_goes_on_with_a_frozen_parameter_is_refused() -> None:
    def made() -> tuple[nn.Module, wb.Accumulator]:
        model = mlp()
        return model, wb.Accumulator(model, sgd(model), steps=2)

    (model, acc), (other, resumed) = made(), made()
    first, second = pieces(samples(7), (4, 3))
    acc.backward(mean=mean(model, first), units=4)
    resumed.load_state_dict(acc.state_dict())
    next(other.parameters()).requires_grad_(False)
    with pytest.raises(wb.errors.StateError, match="with the same ones frozen"):
        resumed.backward(mean=mean(other, second), units=3)
    acc.discard()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in its compiler
def test_a_compiled_step_takes_a_parameter_in_another_memory_layout() -> None:
    model: Any = mlp()
    whole = copy.deepcopy(model)
    step, optimizer = step_of(model, execute="compile"), sgd(whole)
    for seed in range(3):
        batch = samples(9 + 2 * seed)
        step(batch)
        optimizer.zero_grad()
        mean(whole, batch).backward()
        optimizer.step()
        for one in (model, whole):
            one[2].weight.data = one[2].weight.data.t().contiguous().t() * 0.9
    assert distance(model.parameters(), whole.parameters()) < EXACT


def in_groups_of_four(model: nn.Module, micro: Batch) -> wb.Loss:
    losses = functional.cross_entropy(model(micro["x"]), micro["y"], reduction="none")
    whole = len(losses) // 4 * 4
    return wb.Loss(losses.sum() + losses[:whole].view(-1, 4).prod(1).sum(), len(losses))


def test_neighbours_that_belong_together_are_refused_where_micro_batches_cut_them() -> None:
    with pytest.raises(wb.errors.UnsupportedError, match="compares samples"):
        step_of(mlp(), loss=in_groups_of_four, micro_batch=18)(samples(54))
    model, batch = mlp(), samples(60)
    whole = copy.deepcopy(model)
    step_of(model, loss=in_groups_of_four, micro_batch=20)(batch)
    (in_groups_of_four(whole, batch).total / 60).backward()
    sgd(whole).step()
    assert distance(model.parameters(), whole.parameters()) < EXACT
