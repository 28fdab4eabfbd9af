"""One model through every door: ms per window and memory, beside each trainer alone.

    python benchmarks/gpu_doors.py                                   # all rows, on a CUDA device
    python benchmarks/gpu_doors.py --rows llama/4 --doors trainer,exact --budget 300
    python benchmarks/gpu_doors.py --rows tiny/2 --execute eager     # a small model, on a CPU too

A Llama of transformers under bf16 autocast (the tiny one in float32), fused AdamW, clipped by norm,
on sequences of one length, without logging and saving. Windows are measured after the first few,
which trace and compile; the median counts. Packages that are missing are named and their rows left
out. Everything runs in one process, one door after the other, each with a fresh model.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import Dataset

import wholebatch as wb

WARM = 4  # windows that are not counted
MEASURED = 8
VOCABULARY = {"llama": 32_000, "tiny": 64}


@dataclass
class Job:
    """One model and split; `clock` says when enough windows were measured."""

    name: str
    window: int
    micro: int
    length: int
    execute: str
    seconds: float
    times: list[float] = field(default_factory=list)
    peak: int = 0

    @property
    def on_cuda(self) -> bool:
        return torch.cuda.is_available()

    @property
    def vocabulary(self) -> int:
        return VOCABULARY[self.name]

    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {
            "llama": (768, 2048, 12, 12),
            "tiny": (32, 64, 2, 2),
        }[self.name]
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            max_position_embeddings=self.length,
            use_cache=False,
            **dict(zip(names, sizes, strict=True)),
        )
        model = LlamaForCausalLM(config).train()
        return model.cuda() if self.on_cuda else model

    def start(self) -> None:
        self.began = time.perf_counter()
        self.times = []
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()

    def window_done(self) -> bool:
        """Note the time after a window; return True if enough were measured."""
        if self.on_cuda:
            torch.cuda.synchronize()
            if len(self.times) == WARM - 1:
                torch.cuda.reset_peak_memory_stats()
            self.peak = torch.cuda.max_memory_allocated()
        self.times.append(time.perf_counter())
        made = len(self.times) - WARM
        late = time.perf_counter() - self.began > self.seconds
        return made >= MEASURED or (late and made >= 2)

    def milliseconds(self) -> float:
        windows = [after - before for before, after in pairwise(self.times[WARM - 1 :])]
        return 1000 * statistics.median(windows)


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences of one length, again and again."""

    def __init__(self, job: Job) -> None:
        draw = torch.Generator().manual_seed(1)
        size = (4 * job.window, job.length)
        self.tokens = torch.randint(0, job.vocabulary, size, generator=draw)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index % len(self.tokens)]
        return {"input_ids": row, "labels": row}


def batches(job: Job, size: int) -> Any:
    tokens = Sequences(job).tokens
    tokens = tokens.cuda() if job.on_cuda else tokens
    while True:
        for part in tokens.split(size):
            yield {"input_ids": part, "labels": part}


def adamw(model: Any, job: Job) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-5, fused=job.on_cuda)


# ---------------------------------------------------------------------- doors


def own_loop(job: Job, *, compiled: bool = False) -> None:
    model = job.model()
    forward = torch.compile(model) if compiled else model
    optimizer = adamw(model, job)
    steps = job.window // job.micro
    job.start()
    for place, batch in enumerate(batches(job, job.micro)):
        with torch.autocast("cuda", torch.bfloat16, enabled=job.on_cuda):
            loss = forward(**batch).loss
        (loss / steps).backward()
        if (place + 1) % steps == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if job.window_done():
                return


def whole_batch(job: Job) -> None:
    model = job.model()

    def loss(model: Any, micro: Any) -> wb.Loss:
        return wb.mean_loss(model(**micro).loss, (micro["labels"][:, 1:] != -100).sum())

    train = wb.WholeBatch(
        model,
        adamw(model, job),
        loss=loss,
        micro_batch=job.micro,
        precision="bf16" if job.on_cuda else "full",
        clip_norm=1.0,
        execute=job.execute,  # type: ignore[arg-type]
    )
    job.start()
    for batch in batches(job, job.window):
        train.step(batch)
        if job.window_done():
            return


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
            gradient_accumulation_steps=job.window // job.micro,
            max_steps=100_000,
            max_grad_norm=1.0,
            bf16=job.on_cuda,
            use_cpu=not job.on_cuda,
            optim="adamw_torch_fused" if job.on_cuda else "adamw_torch",
            lr_scheduler_type="constant",
            dataloader_pin_memory=job.on_cuda,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            **options,
        )
        kind: Any = exact(Trainer, execute=job.execute) if ours else Trainer  # type: ignore[arg-type]
        host = kind(model=job.model(), args=args, train_dataset=Sequences(job), callbacks=[Clock()])
        host.train()
    if ours and host._whole is not None:
        print("   " + "; ".join(host._whole._runner.executor.notes.history), flush=True)


DOORS: dict[str, tuple[str, tuple[str, ...], Callable[[Job], None]]] = {
    "loop": ("own loop", (), own_loop),
    "loop+": ("own loop, torch.compile", (), lambda job: own_loop(job, compiled=True)),
    "trainer": ("Trainer", ("accelerate",), trainer),
    "trainer+": (
        "Trainer, torch_compile",
        ("accelerate",),
        lambda j: trainer(j, torch_compile=True),
    ),
    "exact": ("exact(Trainer)", ("accelerate",), lambda job: trainer(job, ours=True)),
    "whole": ("WholeBatch", (), whole_batch),
}
ROWS = {
    "llama/4": ("llama", 64, 4, 1024),
    "llama/1": ("llama", 64, 1, 1024),
    "tiny/2": ("tiny", 8, 2, 16),
}


def missing(packages: tuple[str, ...]) -> list[str]:
    wanted = ("transformers", *packages)
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def measured(row: str, door: str, execute: str, seconds: float) -> tuple[float, float] | str:
    """Return ms per window and GiB, or why there are none."""
    name, window, micro, length = ROWS[row]
    job = Job(name, window, micro, length, execute, seconds)
    try:
        DOORS[door][2](job)
    except Exception as problem:  # the other doors are still measured
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}"
    finally:
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return job.milliseconds(), job.peak / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="llama/4,llama/1", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--doors", default=",".join(DOORS), help=f"of {', '.join(DOORS)}")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--execute", default="graph", help="of WholeBatch and exact(Trainer)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    ends = time.perf_counter() + options.budget
    todo = [(row, door) for row in options.rows.split(",") for door in options.doors.split(",")]
    table = ["| model, micro | door | ms per window | GiB |", "|---|---|---:|---:|"]
    for place, (row, door) in enumerate(todo):
        label, packages, _ = DOORS[door]
        left = ends - time.perf_counter()
        without = missing(packages)
        if without:
            found: tuple[float, float] | str = f"missing: {', '.join(without)}"
        elif left <= 0:
            found = "no time left"
        else:
            found = measured(row, door, options.execute, left / (len(todo) - place))
        shown = found if isinstance(found, str) else f"{found[0]:.1f} | {found[1]:.2f}"
        table.append(f"| {row} | {label} | {shown} |")
        print(table[-1], flush=True)
    print("\n".join(["", *table]), flush=True)


if __name__ == "__main__":
    main()
