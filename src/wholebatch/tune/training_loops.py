"""Training loops that make one update per `next()`: ours, manual ones, other libraries'."""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from wholebatch.batch import split, to_device
from wholebatch.losses.loss import Loss, as_loss
from wholebatch.options import flattened, grouped
from wholebatch.tune.window_timing import Make, PeakMeter
from wholebatch.whole_batch import WholeBatch


@dataclass
class Job:
    """A batch to train on in micro-batches, and everything that a loop needs."""

    make: Make
    """Returns the model, on its device, and its optimizer; called once for every loop."""
    loss: Callable[[Any, Any], Any]
    batches: Callable[[], Any]
    """Returns the next whole batch, in host memory; all have the same size."""
    micro_batch: int
    device: torch.device
    precision: str = "full"
    clip_norm: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other options of `WholeBatch`, such as `units`, `batchnorm` and `close`."""
    is_compiled: bool = field(default=False, init=False)
    """True if the current loop allocates tensors where no meter sees them."""

    def __post_init__(self) -> None:
        self.options = flattened(self.options)
        self.meter = PeakMeter(self.device)
        self.first = self.batches()
        self.steps = len(split(self.first, self.micro_batch, static=self._static))

    @property
    def _static(self) -> Any:
        return self.options.get("static", ())

    def micro_batches(self, *, whole: bool = False) -> Iterator[Any]:
        """Yield micro-batches of one batch after the other, without end; with `whole`, the batches.

        Every loop begins with the same batch, so that the first gradients can be compared.
        """
        batch = self.first
        while True:
            if whole:
                yield batch
            else:
                yield from split(batch, self.micro_batch, static=self._static)
            batch = self.batches()

    def loader(self) -> DataLoader[Any]:
        """Return the same micro-batches as a DataLoader."""
        return DataLoader(self.dataset(), batch_size=None, pin_memory=self.device.type == "cuda")

    def dataset(self) -> IterableDataset[Any]:
        """Return the same micro-batches as a dataset."""
        return _Stream(self)

    def mean(self, model: Any, micro: Any) -> Tensor:
        """Return the mean over the micro-batch's own units: the loss of every other loop."""
        self.meter.follow_thread()
        found = as_loss(self.loss(model, micro))
        if isinstance(found, Loss):
            return found.total / found.units
        parts = [term.weight * term.total / term.units for term in found.by_name.values()]
        return torch.stack(parts).sum()

    def autocast(self) -> torch.autocast:
        """Return the autocast context for manual loops."""
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.precision != "full")


class _Stream(IterableDataset[Any]):
    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[Any]:
        return self._job.micro_batches()


_ACCELERATE = {"full": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
_LIGHTNING = {"full": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp8": "bf16-mixed"}


def accelerate(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run `accelerator.accumulate(model)`."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        gradient_accumulation_steps=job.steps,
        mixed_precision=_ACCELERATE[job.precision],
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
                bf16=job.precision in ("bf16", "fp8"),
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
                optimizers=(optimizer, LambdaLR(optimizer, lambda _: 1.0)),
                callbacks=[Watch()],
            ).train()

    return driven(run)


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


Loop = Callable[[Job, nn.Module, torch.optim.Optimizer], Iterator[None]]


@dataclass(frozen=True)
class TrainingLoop:
    """One training loop: its name, and the generator that makes an update per `next()`."""

    name: str
    updates: Loop
    package: str | None = None
    """The package that it needs."""


def _ours(execute: str) -> Loop:
    def loop(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        def loss(model: Any, micro: Any) -> Any:
            job.meter.follow_thread()
            return job.loss(model, micro)

        train = WholeBatch(
            model,
            optimizer,
            loss=loss,
            precision=job.precision,  # type: ignore[arg-type]
            execute=execute,  # type: ignore[arg-type]
            clip_norm=job.clip_norm,
            **grouped({**job.options, "micro_batch": job.micro_batch, "nonfinite": "skip"}),
        )
        for batch in train.over(job.micro_batches(whole=True), ahead=True):
            train.step(batch)
            job.is_compiled = train._runner.executor.mode != "eager"
            yield

    return loop


def _by_hand(*, compiled: bool = False, whole: bool = False) -> Loop:
    def loop(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        called: Any = torch.compile(model) if compiled else model
        job.is_compiled = compiled
        scaler = torch.amp.GradScaler(job.device.type, enabled=job.precision == "fp16")
        steps = 1 if whole else job.steps
        for at, host in enumerate(job.micro_batches(whole=whole), start=1):
            micro = to_device(host, job.device)
            with job.autocast():
                loss = job.mean(called, micro) / steps
            scaler.scale(loss).backward()
            if at % steps == 0:
                if job.clip_norm is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                yield

    return loop


LOOPS: dict[str, TrainingLoop] = {
    loop.name: loop
    for loop in (
        TrainingLoop("wholebatch", _ours("auto")),
        TrainingLoop("wholebatch eager", _ours("eager")),
        TrainingLoop("loop", _by_hand()),
        TrainingLoop("loop + torch.compile", _by_hand(compiled=True)),
        TrainingLoop("whole batch", _by_hand(whole=True)),
        TrainingLoop("whole batch + torch.compile", _by_hand(whole=True, compiled=True)),
        TrainingLoop("Accelerate", accelerate, "accelerate"),
        TrainingLoop("Fabric", fabric, "lightning"),
        TrainingLoop("Lightning", lightning, "lightning"),
        TrainingLoop("Transformers", transformers, "transformers"),
    )
}
"""All loops by name, in the order in which they are shown."""
