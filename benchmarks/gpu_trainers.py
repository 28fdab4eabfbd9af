"""Speed and memory of each trainer, with and without wholebatch.

    python benchmarks/gpu_trainers.py                                   # all rows, on a CUDA device
    python benchmarks/gpu_trainers.py --rows llama/4 --trainers trainer,exact --budget 300
    python benchmarks/gpu_trainers.py --rows tiny/2 --execute eager  # a small model, on a CPU too
    python benchmarks/gpu_trainers.py --rows llama-1b/4 --trainers acc,exact,whole --fp8
    python benchmarks/gpu_trainers.py --llama     # beside torch.compile of the undivided batch
    python benchmarks/gpu_trainers.py --llama --rows llama/4,llama/64 --budget 60 --profile

A Llama of transformers under bf16 autocast (the tiny one in float32), fused AdamW, clipped by norm,
on sequences of one length, without logging and saving. Windows are measured after the first few,
which trace and compile; the median counts, by the device's clock and without waiting in between.
GiB are what is reserved on the device at the end, the memory of recorded graphs with it. (The
windows 2, 4, 8, ... of wholebatch also run eager code, and need its memory.) Packages that are
missing are named and their rows left out. Everything runs in one process, one trainer after the
other, each with a fresh model. The rows of `--llama` are processes, which get ready side by side;
while one is timed the others are stopped.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speed.device_time import Profile, mark, milliseconds, shown
from speed.plan import Expected
from speed.together import Child, run_rows
from torch.utils.data import Dataset

import wholebatch as wb
from wholebatch.compile import ExecuteWarning

WARM = 4  # windows that are not counted
MEASURED = 8
VOCABULARY = {
    "llama": 32_000,
    "llama-1b": 32_000,
    "lora": 32_000,
    "qwen2": 151_936,
    "t5": 32_128,
    "tiny": 64,
}
SIZES = {
    "llama": (768, 2048, 12, 12),
    "llama-1b": (2048, 5632, 22, 32),
    "lora": (2048, 5632, 22, 32),
    "qwen2": (896, 4864, 24, 14),
    "tiny": (32, 64, 2, 2),
}
"""Width, width of the perceptrons, layers and heads."""


@dataclass
class Job:
    """One model and split; `clock` says when enough windows were measured."""

    name: str
    window: int
    micro: int
    length: int
    execute: str
    seconds: float
    times: list[Any] = field(default_factory=list)
    waits: bool = False
    """True if another process says when to begin with the windows that count."""
    profiles: bool = False
    profile: str = ""
    """The kernels of two windows more."""
    fp8: bool = False
    """True if the entry points of wholebatch compute linear layers in 8 bits."""

    @property
    def precision(self) -> Any:
        return "fp8" if self.fp8 else None

    @property
    def on_cuda(self) -> bool:
        return torch.cuda.is_available()

    @property
    def how(self) -> dict[str, Any]:
        """The options by which micro-steps of ours run."""
        return {"execute": self.execute, "precision": self.precision}

    @property
    def vocabulary(self) -> int:
        return VOCABULARY[self.name]

    def model(self) -> Any:
        torch.manual_seed(0)
        with torch.device("cuda" if self.on_cuda else "cpu"):
            made = t5() if self.name == "t5" else llama(self)
            if self.name == "lora":
                made = with_lora(made)
        made.train()
        return made

    def start(self) -> None:
        self.began = time.perf_counter()
        self.times = []

    def window_done(self) -> bool:
        """Note the time after a window; return True if enough were measured."""
        made = len(self.times) + 1 - WARM
        if made == 0:
            self._settle()
        self.times.append(mark())
        if self.waits:
            sys.stderr.write(f"window after {time.perf_counter() - self.began:.1f} s\n")
        late = time.perf_counter() - self.began > self.seconds
        if not self.profiles:
            return made >= MEASURED or (late and made >= 2)
        if made == MEASURED:
            self._profile = Profile()
        elif made == MEASURED + 2:
            self.profile = shown(self._profile.found(2))
        return made == MEASURED + 2

    def _settle(self) -> None:
        """Wait for the device, and for the word if there is one; count memory from here on."""
        if self.on_cuda:
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if self.waits:
            print("READY", flush=True)
            sys.stdin.readline()

    def found(self) -> tuple[float, float, str]:
        """Return ms per window, GiB, and the kernels."""
        ms = statistics.median(milliseconds(self.times[WARM - 1 : WARM + MEASURED]))
        held = torch.cuda.memory_reserved() if self.on_cuda else 0
        return ms, held / 2**30, self.profile


def llama(job: Job) -> Any:
    import transformers

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes: dict[str, Any] = dict(zip(names, SIZES[job.name], strict=True))
    kind = "Llama"
    if job.name == "qwen2":  # of 0.5 B
        kind, sizes["num_key_value_heads"], sizes["tie_word_embeddings"] = "Qwen2", 2, True
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=job.vocabulary,
        max_position_embeddings=job.length,
        use_cache=False,
        **sizes,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def t5() -> Any:
    """T5-base."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32_128, d_model=768, d_ff=3072, num_layers=12, num_heads=12, use_cache=False
    )
    config.decoder_start_token_id = config.pad_token_id = 0
    return T5ForConditionalGeneration(config)


def with_lora(model: Any) -> Any:
    """LoRA of rank 16 on every projection of attention, as PEFT makes it."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=16, target_modules=targets))


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
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=5e-5, fused=job.on_cuda)


# ---------------------------------------------------------------------- trainers


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

    train = wb.WholeBatch(
        model,
        adamw(model, job),
        loss=loss_of,
        micro_batch=job.micro,
        precision=job.precision or ("bf16" if job.on_cuda else "full"),
        clip_norm=1.0,
        execute=job.execute,  # type: ignore[arg-type]
    )
    job.start()
    for batch in batches(job, job.window):
        train.step(batch)
        if job.window_done():
            return


def loss_of(model: Any, batch: Any) -> wb.Loss:
    return wb.mean_loss(model(**batch).loss, (batch["labels"][:, 1:] != -100).sum())


def own_loop_run(job: Job) -> None:
    model = job.model()
    steps, optimizer = job.window // job.micro, adamw(model, job)
    acc = wb.Accumulator(model, optimizer, steps=steps, clip_norm=1.0, **job.how)
    loss = partial(loss_of, model)
    job.start()
    for batch in batches(job, job.micro):
        with torch.autocast("cuda", torch.bfloat16, enabled=job.on_cuda):
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
        cpu=not job.on_cuda,
        mixed_precision="bf16" if job.on_cuda else "no",
        gradient_accumulation_steps=job.window // job.micro,
        **options,
    )
    model = job.model()
    model, optimizer = accelerator.prepare(model, adamw(model, job))
    windows = AccelerateAccumulator(accelerator, model, optimizer, **job.how) if ours else None
    loss = partial(loss_of, model)
    job.start()
    for batch in batches(job, job.micro):
        with accelerator.accumulate(model):
            if windows is None:
                accelerator.backward(model(**batch).loss)
            else:
                windows.run(loss, batch)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and job.window_done():
            return


def fabric(job: Job, *, ours: bool = False, compiled: bool = False) -> None:
    from lightning.fabric import Fabric

    from wholebatch.integrations.lightning import FabricAccumulator

    host = Fabric(
        accelerator="cuda" if job.on_cuda else "cpu",
        devices=1,
        precision="bf16-mixed" if job.on_cuda else "32-true",
    )
    plain = job.model()
    given: Any = torch.compile(plain) if compiled else plain
    model, optimizer = host.setup(given, adamw(plain, job))
    windows = FabricAccumulator(host, model, optimizer, **job.how) if ours else None
    loss = partial(loss_of, model)
    steps = job.window // job.micro
    job.start()
    for place, batch in enumerate(batches(job, job.micro)):
        last = (place + 1) % steps == 0
        if windows is None:
            host.backward(model(**batch).loss / steps)
        else:
            windows.run(loss, batch, last=last)
        if last:
            host.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            if job.window_done():
                return


def lightning(job: Job, *, ours: bool = False, compiled: bool = False) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader

    from wholebatch.integrations.lightning import ExactAccumulation

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()
            self.call = torch.compile(self.model) if compiled else self.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.call(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return adamw(self.model, job)

    class Clock(Callback):
        def on_train_start(self, *_: Any) -> None:
            job.start()

        def on_train_batch_end(self, trainer: Any, _: Any, *given: Any) -> None:
            number = given[-1] + 1
            if number % trainer.accumulate_grad_batches == 0 and job.window_done():
                trainer.should_stop = True

    callbacks: list[Any] = [Clock()]
    if ours:
        units = lambda batch: (batch["labels"][:, 1:] != -100).sum()  # noqa: E731
        callbacks.append(ExactAccumulation(units=units, **job.how))
    host = Trainer(
        max_steps=WARM + MEASURED + 1,
        accelerator="cuda" if job.on_cuda else "cpu",
        devices=1,
        precision="bf16-mixed" if job.on_cuda else "32-true",
        accumulate_grad_batches=job.window // job.micro,
        # Lightning does not clip the gradients of a fused AdamW under bf16.
        gradient_clip_val=None if job.on_cuda else 1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    host.fit(Module(), DataLoader(Sequences(job), batch_size=job.micro))


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
        kind: Any = exact(Trainer, **job.how) if ours else Trainer
        host = kind(model=job.model(), args=args, train_dataset=Sequences(job), callbacks=[Clock()])
        host.train()
    if ours and host._whole is not None:
        print("   " + "; ".join(host._whole._runner.executor.notes.history), flush=True)


TRAINERS: dict[str, tuple[str, tuple[str, ...], Callable[[Job], None]]] = {
    "loop": ("own loop", (), own_loop),
    "loop+": ("own loop, torch.compile", (), lambda job: own_loop(job, compiled=True)),
    "trainer": ("Trainer", ("accelerate",), trainer),
    "trainer+": (
        "Trainer, torch_compile",
        ("accelerate",),
        lambda j: trainer(j, torch_compile=True),
    ),
    "exact": ("exact(Trainer)", ("accelerate",), lambda job: trainer(job, ours=True)),
    "acc": ("Accumulator.run", (), own_loop_run),
    "accelerate": ("Accelerate", ("accelerate",), accelerate),
    "accelerate+": (
        "Accelerate, dynamo",
        ("accelerate",),
        lambda job: accelerate(job, dynamo_backend="inductor"),
    ),
    "accelerate*": (
        "Accelerate, windows.run",
        ("accelerate",),
        lambda job: accelerate(job, ours=True),
    ),
    "fabric": ("Fabric", ("lightning",), fabric),
    "fabric+": ("Fabric, torch.compile", ("lightning",), lambda job: fabric(job, compiled=True)),
    "fabric*": ("Fabric, windows.run", ("lightning",), lambda job: fabric(job, ours=True)),
    "lightning": ("Lightning", ("lightning",), lightning),
    "lightning+": (
        "Lightning, torch.compile",
        ("lightning",),
        lambda job: lightning(job, compiled=True),
    ),
    "lightning*": (
        "Lightning, ExactAccumulation",
        ("lightning",),
        lambda job: lightning(job, ours=True),
    ),
    "whole": ("WholeBatch", (), whole_batch),
}
ROWS = {
    "llama/4": ("llama", 64, 4, 1024),
    "llama/1": ("llama", 64, 1, 1024),
    "llama/8": ("llama", 64, 8, 1024),
    "llama/64": ("llama", 64, 64, 1024),
    "llama-1b/1": ("llama-1b", 32, 1, 1024),
    "llama-1b/4": ("llama-1b", 32, 4, 1024),
    "llama-1b/32": ("llama-1b", 32, 32, 1024),
    "qwen2/2": ("qwen2", 32, 2, 1024),
    "lora/4": ("lora", 32, 4, 1024),
    "t5/4": ("t5", 64, 4, 512),
    "tiny/2": ("tiny", 8, 2, 16),
}
LLAMA = {
    ("llama-1b/32", "loop+"): 76,
    ("llama-1b/4", "whole"): 34,
    ("llama/4", "whole"): 7,
    ("llama/8", "whole"): 8,
    ("qwen2/2", "whole"): 15,
    ("llama-1b/1", "whole"): 30,
    ("llama/64", "loop+"): 40,
}
"""The Llama family, beside the undivided batch: one micro-batch of the whole window; GiB.

The first one takes longest to compile; the others are made ready beside it.
"""
_SECONDS_OF_A_ROW = 35.0


def missing(packages: tuple[str, ...]) -> list[str]:
    wanted = ("transformers", *packages)
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def measured(
    row: str, name: str, execute: str, seconds: float, **options: Any
) -> tuple[float, float, str] | str:
    """Return ms per window, GiB and kernels, or why there are none."""
    kind, window, micro, length = ROWS[row]
    job = Job(kind, window, micro, length, execute, seconds, **options)
    try:
        TRAINERS[name][2](job)
        return job.found()
    except Exception as problem:  # the other trainers are still measured
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}"
    finally:
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def line(row: str, name: str, found: Any) -> str:
    """Print the line of the table for what was found, and return it."""
    ms, gib, profile = (found, "", "") if isinstance(found, str) else found
    shown = f"| {row} | {TRAINERS[name][0]} | {ms if gib == '' else f'{ms:.1f} | {gib:.2f}'} |"
    print("\n".join(filter(None, (shown, profile))), flush=True)
    return shown


def one_by_one(todo: list[tuple[str, str]], execute: str, budget: float, *, fp8: bool) -> list[str]:
    """Measure these rows in this process; return the lines of their table."""
    ends, lines = time.perf_counter() + budget, []
    for place, (row, name) in enumerate(todo):
        left = ends - time.perf_counter()
        without = missing(TRAINERS[name][1])
        if without:
            found: Any = f"missing: {', '.join(without)}"
        elif left <= 0:
            found = "no time left"
        else:
            found = measured(row, name, execute, left / (len(todo) - place), fp8=fp8)
        lines.append(line(row, name, found))
    return lines


def side_by_side(
    rows: list[tuple[str, str]], options: list[str], budget: float, together: int
) -> list[str]:
    """Measure rows that get ready in processes of their own; return the lines of their table."""
    lines, all_found = list[str](), dict[str, Any]()
    script, paths = Path(__file__).resolve(), os.environ.get("PYTHONPATH", "")

    def report(row: dict[str, Any]) -> None:
        found = all_found[row["model"]] = row.get("found", row.get("error"))
        lines.append(line(row["model"], row["mode"], found))

    run_rows(
        [(row, name, 0) for row, name in rows],
        lambda spec, gib: Child(script, spec, options, paths, gib),
        lambda spec: Expected(_SECONDS_OF_A_ROW, LLAMA[spec[:2]]),
        until=time.monotonic() + budget,
        together=together,
        warm_up=budget,
        rounds=1,
        report=report,
    )
    for row, found in all_found.items():
        name, window, micro, _ = ROWS[row]
        whole = all_found.get(f"{name}/{window}")
        if micro < window and isinstance(found, list) and isinstance(whole, list):
            of = (
                f"{found[0] / whole[0]:.2f} of the time and {found[1] / whole[1]:.3f} of the memory"
            )
            print(f"{row}: {of} of the undivided batch", flush=True)
    return lines


def write(page: Path, table: list[str]) -> None:
    """Write the table as a page, with the date, the device and the versions."""
    names = ("torch", "transformers", "accelerate", "lightning", "peft")
    found = [name for name in names if importlib.util.find_spec(name) is not None]
    versions = ", ".join(f"{name} {version(name)}" for name in found)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    head = [
        "# Speed of each trainer, with and without wholebatch",
        "",
        f"Written by `python benchmarks/gpu_trainers.py` on {date.today()}: {device}, {versions}.",
        "",
        "Median of the windows after the first four, at most eight; bf16 autocast, fused AdamW,",
        "clipped by norm. Window, micro-batch and length of each row are in the script.",
        "",
    ]
    page.write_text("\n".join([*head, *table, ""]), encoding="utf-8")


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # unpacked by hand
        return str(getattr(importlib.import_module(name), "__version__", "?"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--trainers", default=",".join(TRAINERS), help=f"of {', '.join(TRAINERS)}")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--execute", default="graph", help="of WholeBatch and exact(Trainer)")
    parser.add_argument("--llama", action="store_true", help="the Llama family, and nothing else")
    parser.add_argument("--together", type=int, default=4, help="rows of --llama at once")
    parser.add_argument("--fp8", action="store_true", help="the entry points of wholebatch in fp8")
    parser.add_argument("--profile", action="store_true", help="kernels of the rows of --llama")
    parser.add_argument("--write", help="a markdown file for the table")
    for name in ("--child", "--models", "--micro"):  # one of the rows that get ready side by side
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", ExecuteWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    if options.child:
        sys.stderr.write(f"imported after {time.process_time():.1f} s of the processor\n")
        both = {"waits": True, "profiles": options.profile}
        found = measured(options.models, options.child, options.execute, 60.0, **both)
        row = {"model": options.models, "mode": options.child, "found": found}
        print(f"ROW {json.dumps(row)}", flush=True)
        return
    table = ["| model, micro | trainer | ms per window | GiB |", "|---|---|---:|---:|"]
    if options.llama:
        wanted = options.rows.split(",") if options.rows else [row for row, _ in LLAMA]
        rows = [(row, name) for row, name in LLAMA if row in wanted]
        given = ["--execute", options.execute, *(["--profile"] if options.profile else [])]
        table += side_by_side(rows, given, options.budget, options.together)
    else:
        rows_of = (options.rows or "llama/4,llama/1").split(",")
        todo = [(row, name) for row in rows_of for name in options.trainers.split(",")]
        table += one_by_one(todo, options.execute, options.budget, fp8=options.fp8)
    print("\n".join(["", *table]), flush=True)
    if options.write is not None:
        write(Path(options.write), table)


if __name__ == "__main__":
    main()
