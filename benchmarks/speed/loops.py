"""The loops that are timed: ours, the hand-written one, and four frameworks by their manuals.

Each is a generator that makes one update with every `next()`, from a window of micro-batches that
a DataLoader reads on the host, and yields what it knows of the loss.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import wholebatch as wb
from speed.models import DEVICE, Case, Micro, mean, summed

__all__ = ["LOOPS", "Loop", "synchronize"]

AMP = DEVICE == "cuda"  # many a CPU has no bf16 unit, and there only the program itself is tried

Loop = Callable[[Case, nn.Module, int], Iterator[float]]


def _loader(case: Case, size: int) -> DataLoader[Any]:
    """By samples, padded to the longest of them: what a micro-batch is to everybody else."""
    return DataLoader(
        case.samples(), batch_size=size, pin_memory=DEVICE == "cuda", collate_fn=case.collate
    )


def synchronize() -> None:
    """Wait until the device has done everything."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _wholebatch(execute: Any) -> Loop:
    def loop(case: Case, model: nn.Module, micro: int) -> Iterator[float]:
        logging.getLogger("wholebatch.compile").setLevel(logging.INFO)
        train = wb.WholeBatch(
            model,
            _adamw(model),
            loss=summed,
            micro_batch=case.split(micro),
            precision="bf16" if AMP else "full",
            execute=execute,
        )
        for batch in train.over(_loader(case, case.window), ahead=True):
            yield train.step(batch).loss

    return loop


def _manual(*, compiled: bool) -> Loop:
    def loop(case: Case, model: nn.Module, micro: int) -> Iterator[float]:
        optimizer = _adamw(model)
        loss_of: Any = torch.compile(mean) if compiled else mean  # the loss is in the graph too
        steps = case.window // micro
        total = torch.zeros((), device=DEVICE)
        for index, batch in enumerate(_loader(case, micro), start=1):
            moved = {name: leaf.to(DEVICE, non_blocking=True) for name, leaf in batch.items()}
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=AMP):
                loss = loss_of(model, moved) / steps
            loss.backward()
            total += loss.detach()
            if index % steps == 0:
                optimizer.step()
                optimizer.zero_grad()
                yield total.item()
                total.zero_()

    return loop


def _accelerate(case: Case, model: nn.Module, micro: int) -> Iterator[float]:
    from accelerate import Accelerator  # type: ignore[import-not-found, import-untyped, unused-ignore]

    steps = case.window // micro
    accelerator = Accelerator(
        gradient_accumulation_steps=steps,
        mixed_precision="bf16" if AMP else "no",
        cpu=DEVICE == "cpu",
    )
    model, optimizer, loader = accelerator.prepare(model, _adamw(model), _loader(case, micro))
    total = torch.zeros((), device=DEVICE)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = mean(model, batch)
            accelerator.backward(loss)
            total += loss.detach() / steps
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            yield total.item()
            total.zero_()


def _fabric(case: Case, model: nn.Module, micro: int) -> Iterator[float]:
    with _either("lightning.fabric", "lightning_fabric") as fabric_module:
        fabric = fabric_module.Fabric(
            accelerator=DEVICE, devices=1, precision="bf16-mixed" if AMP else "32-true"
        )
    fabric.launch()
    model, optimizer = fabric.setup(model, _adamw(model))
    loader = fabric.setup_dataloaders(_loader(case, micro))
    steps = case.window // micro
    total = torch.zeros((), device=DEVICE)
    for index, batch in enumerate(loader, start=1):
        accumulating = index % steps != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = mean(model, batch) / steps
            fabric.backward(loss)
        total += loss.detach()
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
            yield total.item()
            total.zero_()


@contextlib.contextmanager
def _either(*names: str) -> Iterator[Any]:
    import importlib

    for name in names:
        with contextlib.suppress(ImportError):
            yield importlib.import_module(name)
            return
    raise ImportError(f"none of {', '.join(names)} is installed")


class _Done(Exception):
    """Raised to end a framework's own loop."""


def _driven(run: Callable[[Callable[[], None]], None]) -> Iterator[float]:
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
            yield float("nan")  # its losses are its own affair
    finally:
        stop.set()
        go.release()
        thread.join(timeout=20)


def _lightning(case: Case, model: nn.Module, micro: int) -> Iterator[float]:
    with _either("lightning.pytorch", "pytorch_lightning") as pl:
        pass
    steps = case.window // micro

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Micro, _: int) -> Tensor:
            return mean(self.model, batch)

        def configure_optimizers(self) -> Any:
            return _adamw(self.model)

    def run(updated: Callable[[], None]) -> None:
        class Watch(pl.Callback):  # type: ignore[misc, name-defined]
            seen = 0

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step > self.seen:
                    self.seen = trainer.global_step
                    synchronize()
                    updated()

        trainer = pl.Trainer(
            accelerator=DEVICE,
            devices=1,
            precision="bf16-mixed" if AMP else "32-true",
            accumulate_grad_batches=steps,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Watch()],
        )
        trainer.fit(Module(), _loader(case, micro))

    return _driven(run)


def _hf_trainer(case: Case, model: nn.Module, micro: int) -> Iterator[float]:
    import transformers  # type: ignore[import-not-found, import-untyped, unused-ignore]

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": mean(self.model, {"x": x, "y": y})}

    def run(updated: Callable[[], None]) -> None:
        class Watch(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                synchronize()
                updated()

        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=case.window // micro,
                max_steps=100_000,
                bf16=AMP,
                use_cpu=DEVICE == "cpu",
                optim="adamw_torch_fused",
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                remove_unused_columns=False,
            )
            transformers.Trainer(
                model=WithLoss(),
                args=arguments,
                train_dataset=case.samples(),
                data_collator=case.collate,
                callbacks=[Watch()],
            ).train()

    return _driven(run)


def _quiet(loop: Loop) -> Loop:
    def quietly(case: Case, model: nn.Module, micro: int) -> Iterator[float]:
        warnings.simplefilter("ignore")
        return loop(case, model, micro)

    return quietly


LOOPS: dict[str, Loop] = {
    "wholebatch graph": _wholebatch("graph" if DEVICE == "cuda" else "compile"),
    "wholebatch compile": _wholebatch("compile"),
    "wholebatch auto": _wholebatch("auto"),
    "wholebatch eager": _wholebatch("eager"),
    "loop": _manual(compiled=False),
    "loop + torch.compile": _manual(compiled=True),
    "whole batch, compiled": _manual(compiled=True),
    "whole batch": _manual(compiled=False),
    "Accelerate": _quiet(_accelerate),
    "Lightning": _quiet(_lightning),
    "Fabric": _quiet(_fabric),
    "HF Trainer": _quiet(_hf_trainer),
}
