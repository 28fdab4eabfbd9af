"""Loops that are slightly wrong: each is refused by name, in every library that lets it happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.integrations.loops import in_lightning, in_transformers
from tests.support import Whole, mean, mlp, pieces, samples, sgd, summed
from wholebatch.errors import LossError, OptionError, UnsupportedError, WindowError

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from transformers import Trainer

from wholebatch.integrations.accelerate import AccelerateAccumulator
from wholebatch.integrations.lightning import FabricAccumulator
from wholebatch.integrations.transformers import exact
from wholebatch.integrations.transformers.weighted_loss import WeightedLoss

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
def test_a_total_is_a_sum_and_a_mean_is_a_mean(library: str) -> None:
    loop, data = Loop(library, steps=4), pieces(samples(14), [4, 2, 5, 3])
    loop.backward(summed(loop.model, data[0]), units=4)
    loop.backward(mean=mean(loop.model, data[1]), units=torch.tensor(2))
    loop.backward(wb.Loss(summed(loop.model, data[2]), 5))
    done = loop.backward(wb.mean_loss(mean(loop.model, data[3]), 3))
    loop.optimizer.step()
    whole = Whole(mlp())
    assert done.loss == pytest.approx(whole.step(samples(14)), rel=1e-12)
    whole.assert_same(loop.inner)


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


def test_a_refused_first_micro_batch_is_forgotten() -> None:
    """Its error is put right by a step, which is none in the middle of a window."""
    loop = Loop("fabric", steps=2)
    loop.add()
    loop.add()
    with pytest.raises(WindowError, match=r"holds a gradient .* optimizer\.step\(\)"):
        loop.add()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.place = 0
    loop.add()
    assert loop.add() is not None


@loops
def test_other_networks_may_hold_gradients(library: str) -> None:
    """As a GAN's other half does."""
    other = nn.Linear(5, 5).double()
    loop = Loop(library, steps=1)
    other(samples(4)["x"]).sum().backward()
    for _ in range(2):
        loop.backward(mean=mean(loop.model, {**samples(4), "x": other(samples(4)["x"])}), units=4)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert loop.windows.updates == 2


@loops
def test_a_backward_that_failed_is_not_gone_on_with(library: str) -> None:
    loop = Loop(library)
    loop.add()
    loss = mean(loop.model, samples(4))
    loss.register_hook(lambda _: torch.zeros(7))
    with pytest.raises(RuntimeError):
        loop.backward(mean=loss, units=4)
    with pytest.raises(WindowError, match=r"call discard\(\) before going on"):
        loop.add()
    loop.windows.discard()
    loop.inner.zero_grad()
    loop.add()


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


def test_lightning_with_a_zero_grad_that_clears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LightningModule, "optimizer_zero_grad", lambda *_, **__: None)
    model = mlp()
    with pytest.raises(WindowError, match=r"model\.0\.\w+ holds a gradient at the first backward"):
        in_lightning(model, sgd(model), pieces(samples(12), [3, 3, 3, 3]), 2)


def test_a_validation_step_may_call_training_step() -> None:
    from lightning.pytorch import Trainer as LightningTrainer
    from torch.utils.data import DataLoader

    from wholebatch.integrations.lightning import ExactAccumulation

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return mean(self.model, batch)

        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return sgd(self)

    module, parts = Module(), pieces(samples(12), [4, 2, 5, 1])
    trainer = LightningTrainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=2,
        val_check_interval=1,
        callbacks=[ExactAccumulation(units=lambda batch: len(batch["y"]))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(parts, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader)
    whole = Whole(mlp())
    for window in pieces(samples(12), [6, 6]):
        whole.step(window)
    whole.assert_same(module.model)


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


class _Engine(nn.Module):
    def __init__(self, sums: torch.dtype) -> None:
        super().__init__()
        self.sums = sums

    def zero_optimization_stage(self) -> int:
        return 2

    def get_data_types(self) -> Any:
        return torch.bfloat16, self.sums


def test_deepspeed_must_add_in_fp32() -> None:
    class Host:
        model = nn.Linear(2, 2)
        optimizer = coupled = micro_batch = window_precision = None
        window_close, batchnorm, audit = wb.Close(), "exact", True
        model_wrapped = _Engine(torch.bfloat16)

    with pytest.raises(UnsupportedError, match="grad_accum_dtype"):
        WeightedLoss(Host, "DeepSpeed")
    Host.model_wrapped = _Engine(torch.float32)
    WeightedLoss(Host, "DeepSpeed")
    Host.window_close = wb.Close(nonfinite="skip")
    with pytest.raises(OptionError, match=r"Trainer runs the steps \(DeepSpeed\)"):
        WeightedLoss(Host, "DeepSpeed")
