"""Loops that are slightly wrong: each is refused by name, in every library that lets it happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.integrations.loops import in_transformers
from tests.support import Whole, mean, mlp, pieces, samples, sgd, summed
from wholebatch.errors import LossError, OptionError, WindowError

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.fabric import Fabric
from transformers import Trainer

from wholebatch.integrations.accelerate import AccelerateAccumulator
from wholebatch.integrations.lightning import FabricAccumulator
from wholebatch.integrations.transformers import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Loop:
    """A loop over one of two libraries: the same words for both."""

    def __init__(self, library: str, steps: int = 3, model: nn.Module | None = None) -> None:
        self.inner = mlp() if model is None else model
        if library == "fabric":
            fabric = Fabric(accelerator="cpu", devices=1)
            self.model, self.optimizer = fabric.setup(self.inner, sgd(self.inner))
            self.windows: Any = FabricAccumulator(fabric, self.model, self.optimizer)
        else:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
            self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
            self.model, self.optimizer = self.accelerator.prepare(self.inner, sgd(self.inner))
            self.windows = AccelerateAccumulator(self.accelerator, self.model, self.optimizer)
        self.library, self.steps, self.place = library, steps, 0

    def backward(self, total: Any = None, **given: Any) -> Any:
        self.place += 1
        last = self.place % self.steps == 0
        if self.library == "fabric":
            return self.windows.backward(total, **given, last=last)
        with self.accelerator.accumulate(self.model):
            return self.windows.backward(total, **given)

    def add(self, number: int = 4) -> Any:
        return self.backward(mean=mean(self.model, samples(number)), units=number)


loops = pytest.mark.parametrize("library", ["accelerate", "fabric"])


@loops
def test_a_mean_that_is_given_as_a_sum_is_refused(library: str) -> None:
    loop = Loop(library)
    with pytest.raises(LossError, match="total is the mean of cross_entropy, and must"):
        loop.backward(mean(loop.model, samples(4)), units=4)
    with pytest.raises(LossError, match="mean"):
        loop.backward(mean=summed(loop.model, samples(4)), units=4)
    with pytest.raises(LossError, match=r"backward\(\) without a loss: give total"):
        loop.backward(units=4)
    with pytest.raises(LossError, match=r"both total and mean="):
        loop.backward(summed(loop.model, samples(4)), mean=torch.zeros(()), units=4)
    with pytest.raises(LossError, match="without units="):
        loop.backward(summed(loop.model, samples(4)))
    with pytest.raises(LossError, match="which has its own units"):
        loop.backward(wb.Loss(summed(loop.model, samples(4)), 4), units=4)
    with pytest.raises(LossError, match=r"several terms \(a\)"):
        loop.backward(wb.Loss.terms({"a": (summed(loop.model, samples(4)), 4)}))


@loops
def test_windows_that_are_never_given_a_loss(library: str) -> None:
    """The library's own backward() goes on working; a step from it would not be exact."""
    loop = Loop(library, steps=1)
    loop.optimizer.step()  # without any gradient
    for parameter in loop.inner.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(WindowError, match=r"no window computed.*windows\.backward\(\).*detach\(\)"):
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.add()
    loop.optimizer.step()
    loop.windows.detach()
    loop.optimizer.step()


@loops
def test_a_window_begins_clean(library: str) -> None:
    loop = Loop(library, steps=2)
    loop.add()
    loop.add()
    with pytest.raises(WindowError, match=r"0\.\w+ holds a gradient .* optimizer\.step\(\)"):
        loop.add()
    loop.optimizer.step()
    loop.place = 0
    if library == "accelerate":
        loop.accelerator.step = 0
    with pytest.raises(WindowError, match=r"optimizer\.zero_grad\(\) after every"):
        loop.add()  # stepped, but not cleared
    loop.place = 0
    if library == "accelerate":
        loop.accelerator.step = 0
    for parameter in loop.inner.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as zero_grad(set_to_none=False) leaves it
    loop.add()
    assert loop.add() is not None


# ------------------------------------------------------------------- Accelerate


def test_a_loop_without_accumulate() -> None:
    loop = Loop("accelerate", steps=4)
    with pytest.raises(WindowError, match=r"`with accelerator\.accumulate\(model\):`"):
        loop.windows.backward(mean=mean(loop.model, samples(4)), units=4)
    loop.add()  # with it
    with pytest.raises(WindowError, match="gradient_accumulation_steps=4"):
        loop = Loop("accelerate", steps=4)
        for _ in range(4):
            loop.add()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.windows.backward(mean=mean(loop.model, samples(4)), units=4)


# -------------------------------------------------------------------- Lightning


# ----------------------------------------------------------------- Transformers


class Weighted(Trainer):
    """Adds a key to every batch, which the loss is a mean over."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return {**super()._prepare_inputs(inputs), "weight": 1.0 + inputs["x"][:, 0].abs()}

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        logits = model.model(inputs["x"])
        return weighted(logits, inputs["y"], inputs["weight"])


def weighted(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits, y, reduction="none")
    return (losses * weight).sum() / weight.sum()


def test_units_are_counted_on_what_the_loss_is_given() -> None:
    def units(inputs: Any) -> Any:
        return inputs["weight"].sum() if "weight" in inputs else len(inputs["y"])

    model = mlp()
    in_transformers(
        model, sgd(model), pieces(samples(16), [3, 5, 2, 6]), 2, kind=Weighted, units=units
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return weighted(model(batch["x"]), batch["y"], 1.0 + batch["x"][:, 0].abs())

    whole = Whole(mlp(), loss=loss)
    for window in pieces(samples(16), [8, 8]):
        whole.step(window)
    whole.assert_same(model)


class Halves(Trainer):
    """Trains on half of every batch, behind the back of whoever counts."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        half = {name: value[: len(value) // 2] for name, value in inputs.items()}
        return super().training_step(model, half, num_items_in_batch)


class Divides(Trainer):
    """Divides by the number of batches, as copies of older training steps do."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss: Any = self.compute_loss(model, self._prepare_inputs(inputs))
        (loss / self.args.gradient_accumulation_steps).backward()
        return loss.detach()


def test_a_training_step_that_divides_again() -> None:
    model = mlp()
    with pytest.raises(LossError, match="training_step divides the loss by 3"):
        in_transformers(model, sgd(model), pieces(samples(12), [4] * 3), 3, kind=Divides)
    with pytest.raises(OptionError, match="it is exact already"):
        exact(exact(Divides))


def test_units_are_conserved() -> None:
    model = mlp()
    with pytest.raises(LossError, match=r"counted 12 units .* are over 6: .* same inputs"):
        in_transformers(model, sgd(model), pieces(samples(24), [4] * 6), 3, kind=Halves)
    Whole(mlp()).assert_same(model)
