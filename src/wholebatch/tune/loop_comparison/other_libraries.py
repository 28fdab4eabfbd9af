"""Gradient accumulation in other libraries, written as their manuals show it."""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.tune.loop_comparison.training_job import Job

__all__ = ["accelerate", "driven", "fabric", "lightning", "transformers"]

_LIGHTNING = {"full": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def accelerate(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run `accelerator.accumulate(model)`."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        gradient_accumulation_steps=job.steps,
        mixed_precision="no" if job.precision == "full" else job.precision,
        cpu=job.device.type == "cpu",
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
    )
    prepared, stepper, loader = accelerator.prepare(model, optimizer, job.loader())
    for micro in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(job.mean(prepared, micro))
            if accelerator.sync_gradients and job.clip_norm is not None:
                accelerator.clip_grad_norm_(prepared.parameters(), job.clip_norm)
            stepper.step()
            stepper.zero_grad()
        if accelerator.sync_gradients:
            yield


def fabric(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run `fabric.no_backward_sync` with `loss / steps`."""
    from lightning.fabric import Fabric

    run = Fabric(
        accelerator=job.device.type,
        devices=1,
        precision=_LIGHTNING[job.precision],  # type: ignore[arg-type]
    )
    run.launch()
    prepared, stepper = run.setup(model, optimizer)
    loader = run.setup_dataloaders(job.loader())
    for at, micro in enumerate(loader, start=1):
        is_last = at % job.steps == 0
        with run.no_backward_sync(prepared, enabled=not is_last):
            run.backward(job.mean(prepared, micro) / job.steps)
        if is_last:
            if job.clip_norm is not None:
                run.clip_gradients(prepared, stepper, max_norm=job.clip_norm)
            stepper.step()
            stepper.zero_grad()
            yield


def lightning(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run `Trainer(accumulate_grad_batches=K)`."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, micro: Any, _: int) -> Tensor:
            return job.mean(self.model, micro)

        def configure_optimizers(self) -> Any:
            return optimizer

    def run(updated: Callable[[], None]) -> None:
        class Watch(pl.Callback):
            seen = 0

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step > self.seen:
                    self.seen = trainer.global_step
                    updated()

        pl.Trainer(
            accelerator=job.device.type,
            devices=1,
            precision=_LIGHTNING[job.precision],  # type: ignore[arg-type]
            accumulate_grad_batches=job.steps,
            gradient_clip_val=job.clip_norm,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Watch()],
        ).fit(Module(), job.loader())

    return driven(run)


def transformers(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run `Trainer` with `gradient_accumulation_steps`."""
    import transformers

    def run(updated: Callable[[], None]) -> None:
        class Watch(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                updated()

        class Mean(transformers.Trainer):
            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
                return job.mean(model, inputs["micro"])

        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=job.steps,
                max_steps=10**9,
                bf16=job.precision == "bf16",
                fp16=job.precision == "fp16",
                use_cpu=job.device.type == "cpu",
                max_grad_norm=job.clip_norm or 0.0,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                remove_unused_columns=False,
                accelerator_config={"dispatch_batches": False},
            )
            Mean(
                model=model,
                args=arguments,
                train_dataset=job.dataset(),
                data_collator=lambda one: {"micro": one[0]},
                optimizers=(optimizer, _constant(optimizer)),
                callbacks=[Watch()],
            ).train()

    return driven(run)


def _constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


class _Done(Exception):
    """Raised to end a framework's own loop."""


def driven(run: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Turn a framework with callbacks into a generator that makes one update at a time.

    The framework runs in a thread.
    """
    updates: queue.Queue[BaseException | None] = queue.Queue(maxsize=1)
    go = threading.Semaphore(0)
    stop = threading.Event()

    def updated() -> None:
        updates.put(None)
        go.acquire()
        if stop.is_set():
            raise _Done

    def body() -> None:
        go.acquire()
        try:
            run(updated)
            problem: BaseException = RuntimeError("its loop ended by itself")
        except _Done:
            return
        except BaseException as raised:
            problem = raised
        updates.put(problem)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        while True:
            go.release()
            update = updates.get()
            if update is not None:
                raise update
            yield
    finally:
        stop.set()
        go.release()
        thread.join(timeout=20)
