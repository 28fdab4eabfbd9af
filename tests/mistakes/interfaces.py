"""The interfaces of the library: each trains a task on its batch, cut into micro-batches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

import wholebatch as wb
from tests.mistakes.task import Batch, Mean, Moment, Sum, Task, pieces, quotient
from wholebatch.integrations.accelerate import AccelerateAccumulator
from wholebatch.integrations.lightning import ExactAccumulation, FabricAccumulator
from wholebatch.integrations.transformers import exact
from wholebatch.options import grouped

Sizes = Sequence[int]
Interface = Callable[[Task, Sizes, int], None]


def as_loss(given: Any) -> Any:
    """What a loss function returns to `WholeBatch`."""
    if isinstance(given, Sum):
        return wb.Loss(given.value, given.units)
    return wb.mean_loss(given.value, given.units) if isinstance(given, Mean) else given


def give(backward: Callable[..., Any], given: Any, **more: Any) -> Any:
    """Call a stream's `backward` as its documentation says."""
    if isinstance(given, Sum):
        return backward(given.value, units=given.units, **more)
    if isinstance(given, Mean):
        return backward(mean=given.value, units=given.units, **more)
    return backward(given, **more)


def own_line(task: Task, place: str, number: int, last: bool, optimizer: Any, micro: Any) -> None:
    if task.line is not None:
        task.line(Moment(place, number, last, task.model, optimizer, micro))


def over(task: Task, parts: Any, sizes: Sizes, optimizer: Any) -> Iterator[tuple[Batch, bool]]:
    """One window of a loop, with the user's own lines in it."""
    own_line(task, "start", 0, False, optimizer, None)
    for number, micro in enumerate(parts):
        last = number == len(sizes) - 1
        yield micro, last
        own_line(task, "after backward", number, last, optimizer, micro)


def whole(task: Task, sizes: Sizes, windows: int = 1) -> None:
    """`wb.WholeBatch` cuts by itself: the first size is its micro-batch."""
    optimizer = task.optimizer(task.model)
    calls = iter(range(10**6))

    def loss(model: Any, micro: Any) -> Any:
        result = as_loss(task.given(model, micro))
        number = next(calls)
        own_line(task, "after backward", number, False, optimizer, micro)
        return result

    train = wb.WholeBatch(
        task.model, optimizer, **grouped({"loss": loss, "micro_batch": sizes[0], **task.options})
    )
    for _ in range(windows):
        own_line(task, "start", 0, False, optimizer, None)
        train.step(task.batch)


def accumulator(task: Task, sizes: Sizes, windows: int = 1, *, by_over: bool = True) -> None:
    """`wb.Accumulator`, with and without `over`."""
    optimizer = task.optimizer(task.model)
    acc = wb.Accumulator(task.model, optimizer, **grouped({"steps": len(sizes), **task.options}))
    for _ in range(windows):
        parts: Any = pieces(task.batch, sizes)
        for micro, _last in over(task, acc.over(parts) if by_over else parts, sizes, optimizer):
            give(acc.backward, task.given(task.model, micro))


def prepared(task: Task, sizes: Sizes) -> tuple[Any, ...]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(sizes))
    loader = DataLoader(pieces(task.batch, sizes), batch_size=None)
    return accelerator, *accelerator.prepare(task.model, task.optimizer(task.model), loader)


def accelerate(
    task: Task, sizes: Sizes, windows: int = 1, *, within_accumulate: bool = True
) -> None:
    accelerator, model, optimizer, loader = prepared(task, sizes)
    exact_windows = AccelerateAccumulator(accelerator, model, optimizer, **task.options)
    for _ in range(windows):
        for micro, _last in over(task, loader, sizes, optimizer):
            with accelerator.accumulate(model) if within_accumulate else nullcontext():
                give(exact_windows.backward, task.given(model, micro))
                optimizer.step()
                optimizer.zero_grad()


def fabric(task: Task, sizes: Sizes, windows: int = 1, *, clears: bool = True) -> None:
    run = Fabric(accelerator="cpu", devices=1)
    model, optimizer = run.setup(task.model, task.optimizer(task.model))
    exact_windows = FabricAccumulator(run, model, optimizer, **task.options)
    for _ in range(windows):
        for micro, last in over(task, pieces(task.batch, sizes), sizes, optimizer):
            give(exact_windows.backward, task.given(model, micro), last=last)
            if last:
                optimizer.step()
                if clears:
                    optimizer.zero_grad()


class Lit(LightningModule):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.model = task, task.model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        given = self.task.given(self.model, batch)
        return {"loss": quotient(given), "units": given.units}

    def configure_optimizers(self) -> Any:
        return self.task.optimizer(self.model)


class OwnLines(Callback):
    def __init__(self, task: Task, sizes: Sizes) -> None:
        self.task, self.parts = task, len(sizes)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            own_line(self.task, "start", 0, False, trainer.optimizers[0], None)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last = batch_idx == self.parts - 1
        own_line(self.task, "after backward", batch_idx, last, trainer.optimizers[0], batch)


def lightning(task: Task, sizes: Sizes, windows: int = 1) -> None:
    trainer = LightningTrainer(
        max_epochs=windows,
        accumulate_grad_batches=len(sizes),
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[ExactAccumulation(**task.options), OwnLines(task, sizes)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(task), DataLoader(pieces(task.batch, sizes), batch_size=None))


class OwnLinesOfATrainer(TrainerCallback):
    def __init__(self, task: Task, optimizer: Any) -> None:
        self.task, self.optimizer, self.number = task, optimizer, 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        own_line(self.task, "start", 0, False, self.optimizer, None)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        own_line(self.task, "after backward", self.number, False, self.optimizer, None)
        self.number += 1


class OfTask(Trainer):
    """The user's own loss, and a loader of batches that are already cut."""

    task: Task
    parts: list[Batch]

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        loss: Tensor = quotient(self.task.given(model, inputs))
        return (loss, {}) if return_outputs else loss

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts, batch_size=None)  # type: ignore[arg-type]


def trainer(task: Task, sizes: Sizes, windows: int = 1) -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    optimizer = task.optimizer(task.model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    options = {"units": task.units, **task.options}
    base: type[Trainer] = options.pop("trainer", OfTask)
    ready = type("OfThisTask", (base,), {"task": task, "parts": pieces(task.batch, sizes)})
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            gradient_accumulation_steps=len(sizes),
            max_steps=windows,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        exact(ready, **options)(
            model=task.model,
            args=args,
            train_dataset=task.batch.get("x", [0]),
            optimizers=(optimizer, schedule),
            callbacks=[OwnLinesOfATrainer(task, optimizer)],
        ).train()


def by_hand(task: Task, sizes: Sizes, windows: int = 1) -> None:
    """Plain torch: sums of gradients, divided once by all units; it checks nothing."""
    optimizer = task.optimizer(task.model)
    for _ in range(windows):
        units = 0.0
        for micro, _last in over(task, pieces(task.batch, sizes), sizes, optimizer):
            loss = as_loss(task.given(task.model, micro))
            loss.total.backward()
            units += float(loss.units)
        for parameter in task.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(units)
        optimizer.step()
        optimizer.zero_grad()


class Prepares(OfTask):
    """A trainer that leaves samples out when it prepares a batch."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared_inputs = super()._prepare_inputs(inputs)
        keep = prepared_inputs["weight"] > 0.4
        return {name: leaf[keep] for name, leaf in prepared_inputs.items()}


def trainer_that_prepares(task: Task, sizes: Sizes, windows: int = 1) -> None:
    trainer(task.but(options={**task.options, "trainer": Prepares}), sizes, windows)


INTERFACES: dict[str, Interface] = {
    "by hand": by_hand,
    "WholeBatch": whole,
    "Accumulator": accumulator,
    "Accumulator, counted": partial(accumulator, by_over=False),
    "Accelerate": accelerate,
    "Accelerate without accumulate()": partial(accelerate, within_accumulate=False),
    "Fabric": fabric,
    "Fabric, never cleared": partial(fabric, clears=False),
    "Lightning": lightning,
    "Trainer": trainer,
    "Trainer that prepares inputs": trainer_that_prepares,
}
