"""fp8 in loops and trainers of others: the update of the undivided batch in the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import wholebatch as wb
from tests.compile.nets import Micro, loss, mean_of_tokens, tagged
from tests.integrations.loops import in_transformers
from tests.support import EXACT, distance, pieces, sgd
from tests.window.test_fp8 import Net, emulated, started

__all__ = ["emulated"]
pytestmark = [
    pytest.mark.usefixtures("graphs_run_as_traced"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SIZES, WINDOWS = (3, 1, 4, 2), 3


def micros() -> list[Micro]:
    return [micro for _ in range(WINDOWS) for micro in pieces(tagged(sum(SIZES)), SIZES)]


def valid(batch: Micro) -> Tensor:
    return (batch["y"] != -100).sum()


def in_own_loop(model: nn.Module, execute: Any) -> None:
    how: Any = {"execute": execute, "precision": "fp8"}
    acc = wb.Accumulator(model, sgd(model), steps=len(SIZES), **how)
    of_micro = partial(loss, model)
    for micro in acc.over(micros()):
        acc.run(of_micro, micro)


def in_accelerate(model: nn.Module, execute: Any) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from wholebatch.integrations.accelerate import AccelerateAccumulator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(SIZES))
    given: Any = DataLoader(micros(), batch_size=None)  # type: ignore[arg-type]
    prepared, optimizer, loader = accelerator.prepare(model, sgd(model), given)
    how: Any = {"execute": execute, "precision": "fp8"}
    windows = AccelerateAccumulator(accelerator, prepared, optimizer, **how)
    of_micro = partial(loss, prepared)
    for batch in loader:
        with accelerator.accumulate(prepared):
            windows.run(of_micro, batch)
            optimizer.step()
            optimizer.zero_grad()


def in_fabric(model: nn.Module, execute: Any) -> None:
    from lightning.fabric import Fabric

    from wholebatch.integrations.lightning import FabricAccumulator

    fabric = Fabric(accelerator="cpu", devices=1)
    set_up, optimizer = fabric.setup(model, sgd(model))
    how: Any = {"execute": execute, "precision": "fp8"}
    windows = FabricAccumulator(fabric, set_up, optimizer, **how)
    of_micro = partial(loss, set_up)
    for index, micro in enumerate(micros(), 1):
        windows.run(of_micro, micro, last=index % len(SIZES) == 0)
        if index % len(SIZES) == 0:
            optimizer.step()
            optimizer.zero_grad()


def in_lightning(model: nn.Module, execute: Any) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from wholebatch.integrations.lightning import ExactAccumulation

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return mean_of_tokens(self.model, batch)

        def configure_optimizers(self) -> Any:
            return sgd(self)

    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=len(SIZES),
        callbacks=[ExactAccumulation(units=valid, execute=execute, precision="fp8")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(micros(), batch_size=None))  # type: ignore[arg-type]


def in_trainer(model: nn.Module, execute: Any) -> None:
    options: Any = {"units": valid, "execute": execute, "precision": "fp8"}
    in_transformers(model, sgd(model), micros(), len(SIZES), mean_of_tokens, **options)


@pytest.mark.parametrize(
    ("library", "package", "execute"),
    [
        (in_own_loop, "torch", "compile"),
        (in_accelerate, "accelerate", "eager"),
        (in_fabric, "lightning", "eager"),
        (in_lightning, "lightning", "eager"),
        (in_trainer, "transformers", "compile"),
    ],
)
def test_update_of_the_undivided_batch(
    library: Callable[..., None], package: str, execute: str
) -> None:
    pytest.importorskip(package)
    model, whole, plain = (Net().double() for _ in range(3))
    library(model, execute)
    counts = library is in_trainer  # It counts the units of a window before the window begins.
    undivided = started("eager", whole, sum(SIZES), counts=counts)
    full = wb.WholeBatch(plain, sgd(plain), loss=loss, micro_batch=sum(SIZES))
    for _ in range(WINDOWS):
        undivided.step(tagged(sum(SIZES)))
        full.step(tagged(sum(SIZES)))
    assert distance(model.parameters(), whole.parameters()) <= EXACT
    assert distance(model.parameters(), plain.parameters()) > 1e-5  # It is another arithmetic.
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_what_is_refused() -> None:
    model = Net()
    bf16: Any = "bf16"
    with pytest.raises(wb.errors.OptionError, match="must be 'fp8', or None"):
        wb.Accumulator(model, sgd(model), steps=2, precision=bf16)
    acc = wb.Accumulator(model, sgd(model), steps=2, precision="fp8")
    with (
        pytest.raises(wb.errors.OptionError, match=r"under autocast to torch\.float16"),
        torch.autocast("cpu", dtype=torch.float16),
    ):
        acc.run(partial(loss, model), tagged(4))
    with pytest.raises(wb.errors.OptionError, match="Give the loss function to run"):
        acc.backward(loss(model, tagged(4)))


def test_what_the_trainer_refuses() -> None:
    transformers = pytest.importorskip("transformers")
    from wholebatch.integrations.transformers import exact

    with pytest.raises(wb.errors.OptionError, match="bf16=True"):
        exact(transformers.Trainer, precision="bf16")  # type: ignore[arg-type]

    class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    with pytest.raises(wb.errors.UnsupportedError, match="if the Trainer runs the steps"):
        in_transformers(
            Net(), sgd(Net()), micros(), 4, mean_of_tokens, kind=Own, units=valid, precision="fp8"
        )
