"""One training loop, in each library over torch, with wholebatch in it: for the laws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support import mean

Micros = Sequence[dict[str, Tensor]]
LossOf = Callable[[nn.Module, Any], Tensor]


def prepared(*given: Any, **options: Any) -> Any:
    """A new Accelerator and what it made of these."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **options)
    return accelerator, *accelerator.prepare(*given)


def in_accelerate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micros: Micros,
    steps: int,
    loss: LossOf = mean,
    **options: Any,
) -> None:
    """Accelerate's loop."""
    from wholebatch.integrations.accelerate import AccelerateAccumulator

    given = DataLoader(micros, batch_size=None)  # type: ignore[arg-type]
    accelerator, inner, stepped, loader = prepared(
        model, optimizer, given, gradient_accumulation_steps=steps
    )
    windows = AccelerateAccumulator(accelerator, inner, stepped, **options)
    for batch in loader:
        with accelerator.accumulate(inner):
            windows.backward(mean=loss(inner, batch), units=len(batch["y"]))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(inner.parameters(), 1e9)
            stepped.step()
            stepped.zero_grad()
            looked_at(model, batch)


def in_fabric(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micros: Micros,
    steps: int,
    loss: LossOf = mean,
    **options: Any,
) -> None:
    """A loop over Fabric."""
    from lightning.fabric import Fabric

    from wholebatch.integrations.lightning import FabricAccumulator

    fabric = Fabric(accelerator="cpu", devices=1)
    set_up, stepped = fabric.setup(model, optimizer)
    windows = FabricAccumulator(fabric, set_up, stepped, **options)
    for index, batch in enumerate(micros):
        last = (index + 1) % steps == 0 or index + 1 == len(micros)
        windows.backward(mean=loss(set_up, batch), units=len(batch["y"]), last=last)
        if last:
            stepped.step()
            stepped.zero_grad(set_to_none=False)
        looked_at(model, batch)


def in_lightning(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micros: Micros,
    steps: int,
    loss: LossOf = mean,
    **options: Any,
) -> None:
    """Lightning's Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    from wholebatch.integrations.lightning import ExactAccumulation

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            made = loss(self.model, batch)
            self.log("loss", made)
            return made

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            looked_at(model, batch)

        def configure_optimizers(self) -> Any:
            return optimizer

    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=steps,
        callbacks=[ExactAccumulation(units=lambda batch: len(batch["y"]), **options)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(micros, batch_size=None))  # type: ignore[arg-type]


class WithLoss(nn.Module):
    """A model as Transformers' Trainer wants it."""

    def __init__(self, model: nn.Module, loss: LossOf) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.model, {"x": x, "y": y})}


def in_transformers(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micros: Micros,
    steps: int,
    loss: LossOf = mean,
    *,
    kind: type[Any] | None = None,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> Any:
    """Transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from wholebatch.integrations.transformers import exact

    class Plain(kind or Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return DataLoader(micros, batch_size=None)  # type: ignore[arg-type]

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            looked_at(model, micros[0])

    args = TrainingArguments(
        output_dir="unused",
        gradient_accumulation_steps=steps,
        max_grad_norm=0.0,
        num_train_epochs=1,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    units = options.pop("units", lambda inputs: len(inputs["y"]))
    trainer = exact(Plain, units=units, **options)(
        model=WithLoss(model, loss),
        args=args,
        train_dataset=micros,
        optimizers=(optimizer, constant),
        callbacks=[Look(), *callbacks],
    )
    trainer.train()
    return trainer


LOOPS: dict[str, Callable[..., Any]] = {
    "accelerate": in_accelerate,
    "lightning": in_lightning,
    "fabric": in_fabric,
    "transformers": in_transformers,
}


@torch.no_grad()
def looked_at(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """An evaluation between two micro-batches, which must leave no trace."""
    training = model.training
    model.eval()
    model(batch["x"])
    model.train(training)
