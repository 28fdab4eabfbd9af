"""Run under torchrun: DeepSpeed as Accelerate sets it up, against plain torch on global batches."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

from tests.support import distance

STEPS, MICRO, RANKS = 4, 4, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.Tanh())
        self.read = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.read(self.layers(tokens))
        return logits


def samples() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (STEPS * MICRO * RANKS + 2 * MICRO * RANKS, 9), generator=draw)
    lengths = torch.randint(1, 9, (len(tokens), 1), generator=draw)
    labels = tokens[:, 1:].masked_fill(torch.arange(8) >= lengths, -100)
    return list(zip(tokens[:, :-1], labels, strict=True))


def mean_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def whole(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The updates of one process on undivided batches."""
    model = Model().to(dtype)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in DataLoader(samples(), batch_size=STEPS * MICRO * RANKS):  # type: ignore[arg-type]
        mean_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [after.detach() - b for after, b in zip(model.parameters(), before, strict=True)]


def updates(stage: int) -> list[Tensor]:
    """What ZeRO of this stage trained, in the loop of Accelerate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DeepSpeedPlugin

    from wholebatch.integrations.accelerate import AccelerateAccumulator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    config = {
        "train_batch_size": STEPS * MICRO * RANKS,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": STEPS,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(gradient_accumulation_steps=STEPS, deepspeed_plugin=plugin)
    inner = Model()
    before = [parameter.detach().clone() for parameter in inner.parameters()]
    data = samples()
    sampler = DistributedSampler(data, RANKS, int(os.environ["RANK"]), shuffle=False)  # type: ignore[arg-type, var-annotated]
    model, optimizer, loader = accelerator.prepare(
        inner,
        torch.optim.SGD(inner.parameters(), lr=0.5),
        DataLoader(data, batch_size=MICRO, sampler=sampler),  # type: ignore[arg-type]
    )
    windows = AccelerateAccumulator(accelerator, model, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            windows.backward(mean=mean_of(model, batch), units=(batch[1] != -100).sum())
            optimizer.step()
            optimizer.zero_grad()
    parameters = list(model.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        return [after.detach() - b for after, b in zip(parameters, before, strict=True)]


def main() -> None:
    warnings.simplefilter("ignore")  # DeepSpeed's own
    # A faster all-reduce on one machine that would be compiled at the first start: gloo will do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    reference = whole()
    errors: dict[str, Any] = {
        f"zero {stage}": distance(updates(stage), reference) for stage in (1, 3)
    }
    errors["one process in float32"] = distance(whole(torch.float32), reference)
    if int(os.environ["RANK"]) == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(errors, file)


if __name__ == "__main__":
    main()
