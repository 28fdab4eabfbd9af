"""The libraries' trainers on CUDA: fp16 with its loss scale, bf16, FSDP; against undivided batches.

Low precision is held to 1.25 times the undivided batch's own distance to float64. A library that
is not installed on the machine is skipped.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import tempfile
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import wholebatch as wb

STEPS, MICRO, WINDOWS, LENGTH, WORDS = 4, 4, 3, 16, 64
LONG = 2**14
"""Samples so long that a few of them outweigh cuBLAS's workspaces: 16 take about 300 MiB."""
RATE = 0.2
GRAPH = 3
"""Times that the samples are repeated where graphs run, which are made in the second window."""
_LIBRARIES = r"(accelerate|lightning|transformers|torch\.distributed)\b"


def need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing or not torch.cuda.is_available():
        raise unittest.SkipTest(f"needs CUDA and {', '.join(packages)}")


@contextmanager
def compiler_may_warn() -> Iterator[None]:
    """Inductor warns about itself (TF32, for one), and is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.filterwarnings("error", "execute=")
        yield


@contextmanager
def libraries_may_warn() -> Iterator[None]:
    """What they say of themselves and of each other, not of what is tested here.

    FSDP of a single rank says that it shards nothing; Lightning makes a LeafSpec, which torch is
    about to give up.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("default", module=_LIBRARIES)
        for message in ("FSDP is switching to use `NO_SHARD`", ".*LeafSpec.* is deprecated"):
            warnings.filterwarnings("ignore", message)
        yield


def samples(length: int = LENGTH) -> Any:
    draw = torch.Generator().manual_seed(1)
    number = MICRO * STEPS * WINDOWS - 2 * MICRO  # the last window is a short one
    tokens = torch.randint(0, WORDS, (number, length), generator=draw)
    lengths = torch.randint(1, length + 1, (number, 1), generator=draw)
    labels = tokens.masked_fill(torch.arange(length) >= lengths, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 32)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, WORDS))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(self.embed(input_ids)).flatten(0, 1)
        return {"loss": functional.cross_entropy(logits, labels.flatten())}


def flat(model: nn.Module) -> Tensor:
    def whole(p: Tensor) -> Tensor:
        return p.full_tensor() if hasattr(p, "full_tensor") else p

    parts = [whole(p).detach().double().cpu().flatten() for p in model.parameters()]
    return torch.cat(parts)


def undivided(autocast: torch.dtype | None = None, length: int = LENGTH, times: int = 1) -> Tensor:
    """Plain torch on whole batches; in float64, or in autocast with fp16's loss scale."""
    model = Model().cuda()
    model = model.double() if autocast is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cuda", enabled=autocast is torch.float16, init_scale=1024.0)
    for batch in DataLoader(samples(length) * times, batch_size=MICRO * STEPS):
        batch = {name: leaf.cuda() for name, leaf in batch.items()}
        with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return flat(model)


def error(trained: Tensor, reference: Tensor) -> float:
    start = flat(Model())
    return float((trained - reference).norm() / (reference - start).norm())


def hold(trained: Tensor, autocast: torch.dtype, length: int = LENGTH, times: int = 1) -> None:
    exact = undivided(length=length, times=times)
    ours, whole = error(trained, exact), error(undivided(autocast, length, times), exact)
    print(f"  {str(autocast)[6:]}: {ours:.2e} from float64, the undivided batch {whole:.2e}")
    assert ours <= 1.25 * whole + 1e-6, (ours, whole)


@contextmanager
def one_process() -> Iterator[None]:
    """As a launcher would start a single process."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # the plugin sets it
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def is_recorded(executor: Any) -> None:
    """Hold that the last micro-steps were a CUDA graph."""
    assert executor.mode == "graph of compile", (executor.mode, executor.notes.history)
    assert executor.kinds.changes == 0


def accelerated(*, graph: bool = False, **options: Any) -> Tensor:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from wholebatch.integrations.accelerate import AccelerateAccumulator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=STEPS, **options)
    inner = Model()
    optimizer = torch.optim.SGD(inner.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(
        inner, optimizer, DataLoader(samples() * (GRAPH if graph else 1), batch_size=MICRO)
    )
    how: Any = {"execute": "graph" if graph else "auto"}
    windows = AccelerateAccumulator(accelerator, model, optimizer, **how)

    def loss_of(batch: dict[str, Tensor]) -> wb.Loss:
        return wb.mean_loss(model(**batch)["loss"], (batch["labels"] != -100).sum())

    for batch in loader:
        with accelerator.accumulate(model):
            if graph:
                windows.run(loss_of, batch)
            else:
                loss = model(**batch)["loss"]
                windows.backward(mean=loss, units=(batch["labels"] != -100).sum())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    if graph:
        is_recorded(windows._functions[loss_of].executor)
    if hasattr(model, "summon_full_params"):
        with type(model).summon_full_params(model):
            return flat(model)
    return flat(model)


def test_accelerate_fp16_and_bf16() -> None:
    need("accelerate")
    from accelerate.utils import GradScalerKwargs

    scale = [GradScalerKwargs(init_scale=1024.0)]
    hold(accelerated(mixed_precision="fp16", kwargs_handlers=scale), torch.float16)
    hold(accelerated(mixed_precision="bf16"), torch.bfloat16)
    with compiler_may_warn():
        bf16 = accelerated(mixed_precision="bf16", graph=True)
        fp16 = accelerated(mixed_precision="fp16", kwargs_handlers=scale, graph=True)
    hold(bf16, torch.bfloat16, times=GRAPH)
    hold(fp16, torch.float16, times=GRAPH)


def test_accelerate_fsdp() -> None:
    need("accelerate")
    from accelerate.utils import FullyShardedDataParallelPlugin

    with one_process():
        with libraries_may_warn():
            trained = accelerated(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        found = error(trained, undivided())
    print(f"  FSDP2, one rank, float32: {found:.2e}")
    assert found <= 2e-5, found  # float32 parameters round more than the update's last digits


def test_lightning_fp16_and_bf16() -> None:
    need("lightning")
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision

    from wholebatch.integrations.lightning import ExactAccumulation

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    units = lambda batch: (batch["labels"] != -100).sum()  # noqa: E731
    for plugin, dtype, execute in (
        (MixedPrecision("16-mixed", "cuda", scaler), torch.float16, "eager"),
        (MixedPrecision("bf16-mixed", "cuda"), torch.bfloat16, "eager"),
        (MixedPrecision("bf16-mixed", "cuda"), torch.bfloat16, "graph"),
    ):
        module, times = Module(), GRAPH if execute == "graph" else 1
        windows = ExactAccumulation(units=units, execute=execute)  # type: ignore[arg-type]
        seen: list[Any] = []

        class Look(Callback):
            def on_train_batch_end(self, *_: Any, windows: Any = windows, seen: Any = seen) -> None:
                seen.append(windows._step.executor)

        with compiler_may_warn() if execute == "graph" else libraries_may_warn():
            Trainer(
                max_epochs=1,
                accelerator="cuda",
                devices=1,
                plugins=[plugin],
                accumulate_grad_batches=STEPS,
                gradient_clip_val=0.5,
                callbacks=[windows, Look()],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(module, DataLoader(samples() * times, batch_size=MICRO))
        if execute == "graph":
            is_recorded(seen[-1])
        hold(flat(module), dtype, times=times)


def trainer_on(data: Any, folder: str, options: dict[str, Any], **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from wholebatch.integrations.transformers import exact

    args = TrainingArguments(
        output_dir=folder,
        max_grad_norm=0.5,
        num_train_epochs=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        **{
            "per_device_train_batch_size": MICRO,
            "gradient_accumulation_steps": STEPS,
            **arguments,
        },
    )

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    kind = exact(InOrder, units=lambda inputs: (inputs["labels"] != -100).sum(), **options)
    return kind(model=Model(), args=args, train_dataset=data)


def test_transformers_bf16_and_auto_micro_batch() -> None:
    need("transformers", "accelerate")
    with tempfile.TemporaryDirectory() as folder:
        # The limit counts what the tests before this one have left on the device.
        gc.collect()
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_allocated() + (220 << 20)
        whole = {"per_device_train_batch_size": MICRO * STEPS, "gradient_accumulation_steps": 1}
        options = {"micro_batch": "auto", "memory": limit}
        cut = trainer_on(samples(LONG), folder, options, **whole, bf16=True)
        cut.train()
        torch.cuda.set_per_process_memory_fraction(1.0)
        chosen = cut._whole.micro_batch_size
        print(f"  auto: micro-batch {chosen} of {MICRO * STEPS}")
        assert 1 < chosen < MICRO * STEPS
        hold(flat(cut.model), torch.bfloat16, LONG)
        trainer = trainer_on(samples(), folder, {}, bf16=True)
        trainer.train()
        hold(flat(trainer.model), torch.bfloat16)
        trainer = trainer_on(samples() * GRAPH, folder, {"execute": "graph"}, bf16=True)
        with compiler_may_warn():
            trainer.train()
        is_recorded(trainer._whole._runner.executor)
        hold(flat(trainer.model), torch.bfloat16, times=GRAPH)
