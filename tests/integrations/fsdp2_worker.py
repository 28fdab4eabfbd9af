"""Run under torchrun: FSDP2 inside Accelerate and Lightning, against undivided global batches."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.distributed.problem import fresh, global_mean, micro
from tests.support import distance

STEPS, RATE, NORM = 3, 0.5, 0.05
SIZES = [[[3, 1, 2], [4, 2]], [[1, 5, 2], [2, 3]]]
"""Samples by rank, window and micro-batch; the second window is a short one."""


def windows_of(rank: int) -> list[list[dict[str, Any]]]:
    places = [[(at, n) for at, n in enumerate(sizes)] for sizes in SIZES[rank]]
    return [
        [micro(100 * rank + 10 * number + at, n) for at, n in window]
        for number, window in enumerate(places)
    ]


def units_of(batch: dict[str, Any]) -> Tensor:
    return (batch["labels"] != -100).sum()


def mean_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    logits = model(batch["tokens"], batch["branch"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def trained_whole() -> list[Tensor]:
    """Return the weights after updates from the batches of all ranks, by plain torch."""
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for one, other in zip(windows_of(0), windows_of(1), strict=True):
        global_mean(model, one + other).backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def gathered(model: nn.Module) -> list[Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


def sharded(model: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    made: nn.Module = model
    return made


def in_accelerate() -> list[Tensor]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from wholebatch.integrations.accelerate import AccelerateAccumulator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = sharded(fresh())  # Accelerate's own plugin does this, on GPUs only
    plain = torch.optim.SGD(model.parameters(), lr=RATE)
    # Accelerate gives every other batch to each rank.
    both = [
        one
        for windows in zip(windows_of(0), windows_of(1), strict=True)
        for pair in zip(*windows, strict=True)
        for one in pair
    ]
    given: Any = DataLoader(both, batch_size=1, collate_fn=lambda found: found[0])  # type: ignore[arg-type]
    optimizer, loader = accelerator.prepare(plain, given)
    windows = AccelerateAccumulator(accelerator, model, optimizer)

    for batch in loader:
        with accelerator.accumulate(model):
            windows.backward(mean=mean_of(model, batch), units=units_of(batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
    return gathered(model)


def in_lightning() -> list[Tensor]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from wholebatch.integrations.lightning import ExactAccumulation

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = fresh()

        def configure_model(self) -> None:
            sharded(self.model)

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            return mean_of(self.model, batch)

        def train_dataloader(self) -> Iterator[Any]:
            mine = [one for window in windows_of(self.global_rank) for one in window]
            return DataLoader(mine, batch_size=None)  # type: ignore[arg-type, return-value]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=RATE)

    module = Module()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        accumulate_grad_batches=STEPS,
        gradient_clip_val=NORM,
        callbacks=[ExactAccumulation(units=units_of)],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return gathered(module.model)


def main() -> None:
    warnings.simplefilter("ignore")  # the libraries' own
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    whole = trained_whole()
    cases = {"Lightning": in_lightning, "Accelerate": in_accelerate}
    errors = {name: distance(case(), whole) for name, case in cases.items()}
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(errors, file)


if __name__ == "__main__":
    main()
