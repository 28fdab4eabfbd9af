"""The ways to make the updates of a task: undivided, by hand, in each trainer, with wholebatch."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import wholebatch as wb
from matter.tasks import Micro, Order, Task

Way = Callable[[Task, torch.optim.Optimizer, Order], None]


def windows(order: Order, steps: int) -> Iterator[list[list[int]]]:
    """Yield the micro-batches of each window of one epoch."""
    micros = iter(order)
    while window := list(islice(micros, steps)):
        yield window


def joined(window: list[list[int]]) -> list[int]:
    return [row for micro in window for row in micro]


def clipped(task: Task, model: nn.Module) -> None:
    if task.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)


def undivided(
    task: Task, optimizer: torch.optim.Optimizer, order: Order, reverse: bool = False
) -> None:
    """The truth: one backward pass over all samples of the window."""
    for _ in range(task.epochs):
        for window in windows(order, task.steps):
            rows = joined(window)
            optimizer.zero_grad()
            task.mean(task.model, task.take(rows[::-1] if reverse else rows)).backward()
            clipped(task, task.model)
            optimizer.step()


def another_order(task: Task, optimizer: torch.optim.Optimizer, order: Order) -> None:
    """The same with the samples of each batch reversed: what rounding alone does."""
    undivided(task, optimizer, order, reverse=True)


def usual_loop(
    task: Task, optimizer: torch.optim.Optimizer, order: Order, at_end: bool = True
) -> None:
    """The loop of most tutorials: `loss / steps`."""
    for _ in range(task.epochs):
        for index, rows in enumerate(order):
            (task.mean(task.model, task.take(rows)) / task.steps).backward()
            if (index + 1) % task.steps == 0 or (at_end and index + 1 == len(order)):
                clipped(task, task.model)
                optimizer.step()
                optimizer.zero_grad()


def no_step_at_end(task: Task, optimizer: torch.optim.Optimizer, order: Order) -> None:
    """The same without a step at the end of the epoch."""
    usual_loop(task, optimizer, order, at_end=False)


def loader(task: Task, order: Order) -> Any:
    indices: Any = range(task.count)
    return DataLoader(indices, batch_sampler=order, collate_fn=task.take)


def accelerate(task: Task, optimizer: torch.optim.Optimizer, order: Order) -> None:
    """Accelerate's `accumulate`, as its guide shows it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.steps)
    model, prepared, batches = accelerator.prepare(task.model, optimizer, loader(task, order))
    for _ in range(task.epochs):
        for micro in batches:
            with accelerator.accumulate(model):
                accelerator.backward(task.mean(model, micro))
                if accelerator.sync_gradients and task.clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), task.clip)
                prepared.step()
                prepared.zero_grad()


def lightning(task: Task, optimizer: torch.optim.Optimizer, order: Order) -> None:
    """Lightning's `accumulate_grad_batches`."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: Micro, batch_idx: int) -> Tensor:
            return task.mean(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        max_epochs=task.epochs,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=task.steps,
        gradient_clip_val=task.clip,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader(task, order))


class WithLoss(nn.Module):
    """A model of one's own as HF Trainer takes it: its forward returns the loss."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.mean = task.model, task.mean

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        micro = {"x": x} if y is None else {"x": x, "y": y}
        return {"loss": self.mean(self.model, micro)}


def hugging_face(
    task: Task,
    optimizer: torch.optim.Optimizer,
    order: Order,
    exactly: bool = False,
    accepts_loss_kwargs: bool | None = None,
) -> None:
    """HF Trainer with `gradient_accumulation_steps`, or `exact` of it.

    `accepts_loss_kwargs` is set on the model where it is given: False is the one-line workaround
    for models that take `num_items_in_batch` and ignore it.
    """
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from wholebatch.integrations.transformers import exact

    class InOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader(task, order)

    model: Any = task.model if task.hugging_face else WithLoss(task)
    if accepts_loss_kwargs is not None:
        model.accepts_loss_kwargs = accepts_loss_kwargs
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=task.micro,
            gradient_accumulation_steps=task.steps,
            num_train_epochs=task.epochs,
            max_grad_norm=task.clip or 0.0,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer = (exact(InOrder) if exactly else InOrder)(
            model=model,
            args=arguments,
            train_dataset=range(task.count),
            optimizers=(optimizer, constant),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def exact_trainer(task: Task, optimizer: torch.optim.Optimizer, order: Order) -> None:
    """`exact(Trainer)`."""
    hugging_face(task, optimizer, order, exactly=True)


def workaround(task: Task, optimizer: torch.optim.Optimizer, order: Order) -> None:
    """HF Trainer, with `model.accepts_loss_kwargs = False`."""
    hugging_face(task, optimizer, order, accepts_loss_kwargs=False)


def grad_cache(task: Task, optimizer: torch.optim.Optimizer, order: Order) -> None:
    """GradCache (arXiv 2101.06983) by hand: features without a graph, their gradients, again."""
    encode, compare = task.loss.encode, task.loss.loss
    for _ in range(task.epochs):
        for window in windows(order, task.steps):
            micros = [task.take(rows) for rows in window]
            with torch.no_grad():
                parts = [encode(task.model, micro) for micro in micros]
            features = [torch.cat(side).requires_grad_() for side in zip(*parts, strict=True)]
            loss = compare(tuple(features))
            (loss.total / loss.units).backward()
            sizes = [len(part[0]) for part in parts]
            gradients = [
                feature.grad.split(sizes) for feature in features if feature.grad is not None
            ]
            optimizer.zero_grad()
            for micro, *wanted in zip(micros, *gradients, strict=True):
                torch.autograd.backward(encode(task.model, micro), wanted)
            clipped(task, task.model)
            optimizer.step()


def wholebatch(task: Task, optimizer: torch.optim.Optimizer, order: Order) -> None:
    """`wb.WholeBatch`."""
    engine = wb.WholeBatch(
        task.model, optimizer, loss=task.loss, micro_batch=task.micro, clip_norm=task.clip
    )
    for _ in range(task.epochs):
        for window in windows(order, task.steps):
            engine.step(task.take(joined(window)))


WAYS: dict[str, Way] = {
    "undivided": undivided,
    "undivided, other order": another_order,
    "usual loop": usual_loop,
    "usual loop, no step at the end": no_step_at_end,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "HF Trainer": hugging_face,
    "HF Trainer, accepts_loss_kwargs=False": workaround,
    "exact(Trainer)": exact_trainer,
    "GradCache": grad_cache,
    "wholebatch": wholebatch,
}


def ways_of(task: Task) -> list[str]:
    """The ways that this task is trained in."""
    left_out = set()
    if task.count % (task.micro * task.steps) == 0:
        left_out.add("usual loop, no step at the end")  # there is no short window
    if not task.hugging_face:
        left_out |= {"exact(Trainer)", "HF Trainer, accepts_loss_kwargs=False"}
    if not isinstance(task.loss, wb.Coupled):
        left_out.add("GradCache")
    return [way for way in WAYS if way not in left_out]


def run(task: Task, way: str, seed: int, points: int) -> dict[str, Any]:
    """Train, and return the curve of the held-out loss, the metric and the last weights."""
    optimizer = task.optimizer(task.model)
    every = max(1, task.updates // points)
    curve: list[tuple[int, float, float]] = []
    updates = 0

    def measure() -> None:
        training = [module.training for module in task.model.modules()]
        task.model.eval()
        with torch.no_grad():
            curve.append((updates, *task.score(task.model)))
        for module, was in zip(task.model.modules(), training, strict=True):
            module.training = was

    def after_step(*_: object) -> None:
        nonlocal updates
        updates += 1
        if updates % every == 0:
            measure()

    handle = optimizer.register_step_post_hook(after_step)
    before = flat(task.model)
    task.model.train()
    measure()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WAYS[way](task, optimizer, Order(task, seed))
    handle.remove()
    measure()
    # A loop that drops windows makes fewer updates from the same samples.
    seen = task.epochs * task.count * task.units / updates
    return {
        "curve": [(done * seen, loss) for done, loss, _ in curve],
        "loss": curve[-1][1],
        "metric": curve[-1][2],
        "updates": updates,
        "before": before,
        "after": flat(task.model),
    }


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector, in float64."""
    return torch.cat([weight.detach().double().flatten() for weight in model.parameters()])
