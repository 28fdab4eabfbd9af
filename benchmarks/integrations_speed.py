"""What wholebatch costs inside each torch library, beside that library's own accumulation.

    python benchmarks/integrations_speed.py                  # all: docs/benchmarks/integrations.md
    python benchmarks/integrations_speed.py lightning        # one; the other rows are kept

A model on one CPU thread whose micro-steps take about 20 ms, in windows of 4, clipped by norm, with
AdamW. The library's own accumulation and wholebatch in it run in turns, some windows each, in one
process; a ratio is taken in every turn, and their median is the result. Measured is the process's
own time on the processor, so that other work on the machine does not count. Fails above 1.03.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "benchmarks"
LIMIT = 1.03
STEPS = 4
WINDOWS = 6  # of one turn; the first is not counted
MICRO, LENGTH, WIDTH, WORDS = 4, 24, 384, 384


@dataclass(frozen=True)
class Row:
    """Medians over the turns."""

    library: str
    micro_step_ms: float
    own_ms: float
    ours_ms: float
    ratio: float
    turns: int


class Model(nn.Module):
    """Two wide layers over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(input_ids)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Clock:
    """When every update of a turn was made."""

    def __init__(self, model: nn.Module) -> None:
        self.times: list[float] = []
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.optimizer.register_step_post_hook(lambda *_: self.times.append(time.process_time()))

    def windows(self) -> list[float]:
        """Seconds of every window but the first, whose start was not seen."""
        return [after - before for before, after in pairwise(self.times)]


def samples() -> Any:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (MICRO * STEPS * WINDOWS, LENGTH), generator=draw)
    lengths = torch.randint(4, LENGTH + 1, (len(tokens), 1), generator=draw)
    labels = tokens.masked_fill(torch.arange(LENGTH) >= lengths, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def counted(batch: Any) -> Tensor:
    labels: Tensor = batch["labels"]
    return (labels != -100).sum()


# ------------------------------------------------------- one turn in each library


def accelerate(ours: bool) -> list[float]:
    from accelerate import Accelerator

    from wholebatch.integrations.accelerate import AccelerateAccumulator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = Model()
    clock = Clock(model)
    model, optimizer, loader = accelerator.prepare(
        model, clock.optimizer, DataLoader(samples(), batch_size=MICRO)
    )
    windows = AccelerateAccumulator(accelerator, model, optimizer) if ours else None
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            if windows is not None:
                windows.backward(mean=loss, units=counted(batch))
            else:
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return clock.windows()


def fabric(ours: bool) -> list[float]:
    from lightning.fabric import Fabric

    from wholebatch.integrations.lightning import FabricAccumulator

    host = Fabric(accelerator="cpu", devices=1)
    inner = Model()
    clock = Clock(inner)
    model, optimizer = host.setup(inner, clock.optimizer)
    loader = host.setup_dataloaders(DataLoader(samples(), batch_size=MICRO))
    windows = FabricAccumulator(host, model, optimizer) if ours else None
    for index, batch in enumerate(loader):
        last = (index + 1) % STEPS == 0
        with host.no_backward_sync(model, enabled=not last):
            loss = model(**batch)["loss"]
            if windows is not None:
                windows.backward(mean=loss, units=counted(batch), last=last)
            else:
                host.backward(loss / STEPS)
        if last:
            host.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return clock.windows()


def lightning(ours: bool) -> list[float]:
    from lightning.pytorch import LightningModule, Trainer

    from wholebatch.integrations.lightning import ExactAccumulation

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.clock = Clock(self.model)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.clock.optimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=STEPS,
        gradient_clip_val=1.0,
        callbacks=[ExactAccumulation(units=counted)] if ours else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(samples(), batch_size=MICRO))
    return module.clock.windows()


def transformers(ours: bool) -> list[float]:
    from transformers import Trainer, TrainingArguments

    from wholebatch.integrations.transformers import exact

    model = Model()
    clock = Clock(model)
    constant = torch.optim.lr_scheduler.LambdaLR(clock.optimizer, lambda _: 1.0)
    options: dict[str, Any] = {"units": counted} if ours else {}
    kind: Any = exact(Trainer, **options) if ours else Trainer
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=STEPS,
            max_grad_norm=1.0,
            num_train_epochs=1,
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
        )
        kind(
            model=model,
            args=args,
            train_dataset=samples(),
            optimizers=(clock.optimizer, constant),
        ).train()
    return clock.windows()


LIBRARIES: dict[str, tuple[str, Callable[[bool], list[float]]]] = {
    "accelerate": ("Accelerate", accelerate),
    "lightning": ("Lightning Trainer", lightning),
    "fabric": ("Lightning Fabric", fabric),
    "transformers": ("Transformers Trainer", transformers),
}


def measured(name: str, turns: int) -> Row:
    label, turn = LIBRARIES[name]
    turn(False), turn(True)  # imports, caches, the allocator
    own: list[float] = []
    ours: list[float] = []
    ratios: list[float] = []
    for index in range(turns):
        order = (False, True) if index % 2 == 0 else (True, False)
        found = {is_ours: turn(is_ours) for is_ours in order}
        own += found[False]
        ours += found[True]
        ratios.append(statistics.median(found[True]) / statistics.median(found[False]))
    return Row(
        library=label,
        micro_step_ms=1000 * statistics.median(own) / STEPS,
        own_ms=1000 * statistics.median(own),
        ours_ms=1000 * statistics.median(ours),
        ratio=statistics.median(ratios),
        turns=turns,
    )


def page(rows: list[Row], day: str) -> str:
    head = f"""# What wholebatch costs inside each library

Windows of {STEPS} micro-batches on one CPU thread, AdamW, clipped by norm: the library's own
accumulation and wholebatch in it, in turns, medians of the process's own time. Written by
`python benchmarks/integrations_speed.py` on {day} with torch {torch.__version__}; fails above
{LIMIT}.

| library | one micro-step | a window, its own | a window, with wholebatch | ratio |
|---|---:|---:|---:|---:|
"""
    return head + "".join(
        f"| {row.library} | {row.micro_step_ms:.1f} ms | {row.own_ms:.1f} ms "
        f"| {row.ours_ms:.1f} ms | {row.ratio:.3f} |\n"
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("libraries", nargs="*", help=f"of {', '.join(LIBRARIES)}; default: all")
    parser.add_argument("--turns", type=int, default=16)
    options = parser.parse_args()
    unknown = sorted(set(options.libraries) - set(LIBRARIES))
    if unknown:
        parser.error(f"{unknown[0]}: must be one of {', '.join(LIBRARIES)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    record = FOLDER / "integrations.json"
    rows: dict[str, dict[str, Any]] = {}
    if options.libraries and record.exists():
        rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    for name in options.libraries or LIBRARIES:
        row = measured(name, options.turns)
        print(f"{row.library:22} {row.micro_step_ms:5.1f} ms  ratio {row.ratio:.3f}", flush=True)
        rows[name] = asdict(row)
    day = date.today().isoformat()
    record.write_text(json.dumps({"date": day, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    shown = [Row(**rows[name]) for name in LIBRARIES if name in rows]
    (FOLDER / "integrations.md").write_text(page(shown, day), encoding="utf-8")
    above = [row.library for row in shown if row.ratio > LIMIT]
    if above:
        raise SystemExit(f"above {LIMIT}: {', '.join(above)}")


if __name__ == "__main__":
    main()
