"""The loops that are timed: wholebatch, a loop by hand and four trainers, each by its own manual.

A loop trains `job.model()` and tells `job.window_done()` of every window, until that is True. A
model takes its batch by name and returns an output with the `loss`, a mean.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

import wholebatch as wb
from speed.device_time import mark, milliseconds
from speed.models import DEVICE, Case, counted, of_transformers

__all__ = ["LOOPS", "Job"]

WARM = 4  # windows that are not counted
MEASURED = 8
CLIP_NORM = 1.0
CUDA = DEVICE == "cuda"


@dataclass
class Job:
    """One model and split, and the clock of its windows."""

    case: Case
    micro: int
    execute: str = "graph"
    times: list[Any] = field(default_factory=list)
    highest: float = 0.0
    """GiB that were reserved at most before the windows that count."""

    @property
    def steps(self) -> int:
        return self.case.window // self.micro

    @property
    def how(self) -> dict[str, Any]:
        """The options by which micro-steps of ours run."""
        return {"execute": self.execute}

    def model(self) -> Any:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            made = self.case.build()
        made.train()
        return made

    def adamw(self, model: Any) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=5e-5, fused=CUDA)

    def batches(self, size: int) -> Iterator[Any]:
        """Yield batches of this many samples on the device, again and again."""
        made = self.case.samples()
        parts = [range(at, at + size) for at in range(0, self.case.window, size)]
        batches = [default_collate([made[index] for index in part]) for part in parts]
        moved = [{name: leaf.to(DEVICE) for name, leaf in batch.items()} for batch in batches]
        while True:
            yield from moved

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.case.samples(), self.micro, pin_memory=CUDA)

    def start(self) -> None:
        if CUDA:  # what the model was made in is not counted
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.began = time.perf_counter()
        self.times = []

    def window_done(self) -> bool:
        """Note the time after a window; return True if enough were measured."""
        if len(self.times) + 1 == WARM:
            self._settle()
        self.times.append(mark())
        sys.stderr.write(f"window after {time.perf_counter() - self.began:.1f} s\n")
        return len(self.times) >= WARM + MEASURED

    def _settle(self) -> None:
        """Wait for the device, and for the word to go on; count memory from here on."""
        if CUDA:
            torch.cuda.synchronize()
            self.highest = torch.cuda.max_memory_reserved() / 2**30
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        print("READY", flush=True)
        sys.stdin.readline()

    def found(self) -> tuple[float, float]:
        """Return ms per window, and GiB that the process has reserved."""
        ms = statistics.median(milliseconds(self.times[WARM - 1 :]))
        return ms, (torch.cuda.memory_reserved() if CUDA else 0) / 2**30


def by_hand(job: Job, *, compiled: bool = False) -> None:
    model = job.model()
    forward = torch.compile(model) if compiled else model
    optimizer = job.adamw(model)
    job.start()
    for place, batch in enumerate(job.batches(job.micro), start=1):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            loss = forward(**batch).loss
        (loss / job.steps).backward()
        if place % job.steps == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            if job.window_done():
                return


def whole_batch(job: Job) -> None:
    model = job.model()
    train = wb.WholeBatch(
        model,
        job.adamw(model),
        loss=of_transformers,
        micro_batch=job.micro,
        precision="bf16" if CUDA else "full",
        clip_norm=CLIP_NORM,
        execute=job.execute,  # type: ignore[arg-type]
    )
    job.start()
    for batch in job.batches(job.case.window):
        train.step(batch)
        if job.window_done():
            return


def accumulator_run(job: Job) -> None:
    model = job.model()
    acc = wb.Accumulator(model, job.adamw(model), steps=job.steps, clip_norm=CLIP_NORM, **job.how)
    loss = partial(of_transformers, model)
    job.start()
    for batch in job.batches(job.micro):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            step = acc.run(loss, batch)
        if step is not None and job.window_done():
            return


def accelerate(job: Job, *, ours: bool = False, **options: Any) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from wholebatch.integrations.accelerate import AccelerateAccumulator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=not CUDA,
        mixed_precision="bf16" if CUDA else "no",
        gradient_accumulation_steps=job.steps,
        **options,
    )
    model = job.model()
    model, optimizer = accelerator.prepare(model, job.adamw(model))
    windows = AccelerateAccumulator(accelerator, model, optimizer, **job.how) if ours else None
    loss = partial(of_transformers, model)
    job.start()
    for batch in job.batches(job.micro):
        with accelerator.accumulate(model):
            if windows is None:
                accelerator.backward(model(**batch).loss)
            else:
                windows.run(loss, batch)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and job.window_done():
            return


def fabric(job: Job, *, ours: bool = False, compiled: bool = False) -> None:
    from lightning.fabric import Fabric

    from wholebatch.integrations.lightning import FabricAccumulator

    host = Fabric(accelerator=DEVICE, devices=1, precision="bf16-mixed" if CUDA else "32-true")
    plain = job.model()
    given: Any = torch.compile(plain) if compiled else plain
    model, optimizer = host.setup(given, job.adamw(plain))
    windows = FabricAccumulator(host, model, optimizer, **job.how) if ours else None
    loss = partial(of_transformers, model)
    job.start()
    for place, batch in enumerate(job.batches(job.micro), start=1):
        last = place % job.steps == 0
        if windows is None:
            host.backward(model(**batch).loss / job.steps)
        else:
            windows.run(loss, batch, last=last)
        if last:
            host.clip_gradients(model, optimizer, max_norm=CLIP_NORM, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            if job.window_done():
                return


def lightning(job: Job, *, ours: bool = False, compiled: bool = False) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from wholebatch.integrations.lightning import ExactAccumulation

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()
            self.call = torch.compile(self.model) if compiled else self.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.call(**batch).loss

        def configure_optimizers(self) -> Any:
            return job.adamw(self.model)

    class Clock(Callback):
        def on_train_start(self, *_: Any) -> None:
            job.start()

        def on_train_batch_end(self, trainer: Any, _: Any, *given: Any) -> None:
            number = given[-1] + 1
            if number % trainer.accumulate_grad_batches == 0 and job.window_done():
                trainer.should_stop = True

    callbacks: list[Any] = [Clock()]
    if ours:
        callbacks.append(ExactAccumulation(units=counted, **job.how))
    host = Trainer(
        max_epochs=1,
        accelerator=DEVICE,
        devices=1,
        precision="bf16-mixed" if CUDA else "32-true",
        accumulate_grad_batches=job.steps,
        # Lightning does not clip the gradients of a fused AdamW under bf16.
        gradient_clip_val=None if CUDA else CLIP_NORM,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    host.fit(Module(), job.loader())


def trainer(job: Job, *, ours: bool = False, **options: Any) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from wholebatch.integrations.transformers import exact

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            job.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = job.window_done()

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=job.micro,
            gradient_accumulation_steps=job.steps,
            max_steps=100_000,
            max_grad_norm=CLIP_NORM,
            bf16=CUDA,
            use_cpu=not CUDA,
            optim="adamw_torch_fused" if CUDA else "adamw_torch",
            lr_scheduler_type="constant",
            dataloader_pin_memory=CUDA,
            remove_unused_columns=False,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            **options,
        )
        kind: Any = exact(Trainer, **job.how) if ours else Trainer
        host = kind(
            model=job.model(),
            args=args,
            train_dataset=job.case.samples(),
            data_collator=default_collate,
            callbacks=[Clock()],
        )
        host.train()
    if ours and host._whole is not None:
        print("   " + "; ".join(host._whole._runner.executor.notes.history), flush=True)


LOOPS: dict[str, tuple[str, Callable[[Job], None]]] = {
    "loop": ("own loop", by_hand),
    "loop+": ("own loop, torch.compile", partial(by_hand, compiled=True)),
    "trainer": ("Trainer", trainer),
    "trainer+": ("Trainer, torch_compile", partial(trainer, torch_compile=True)),
    "exact": ("exact(Trainer)", partial(trainer, ours=True)),
    "acc": ("Accumulator.run", accumulator_run),
    "accelerate": ("Accelerate", accelerate),
    "accelerate+": ("Accelerate, dynamo", partial(accelerate, dynamo_backend="inductor")),
    "accelerate*": ("Accelerate, windows.run", partial(accelerate, ours=True)),
    "fabric": ("Fabric", fabric),
    "fabric+": ("Fabric, torch.compile", partial(fabric, compiled=True)),
    "fabric*": ("Fabric, windows.run", partial(fabric, ours=True)),
    "lightning": ("Lightning", lightning),
    "lightning+": ("Lightning, torch.compile", partial(lightning, compiled=True)),
    "lightning*": ("Lightning, ExactAccumulation", partial(lightning, ours=True)),
    "whole": ("WholeBatch", whole_batch),
}
"""By the name on the command line: the name on the page, and the loop."""
