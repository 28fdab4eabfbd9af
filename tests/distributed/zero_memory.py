"""The memory that ZeRO 1 to 3 take on one of two ranks, and its prediction."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.losses.loss import cross_entropy
from wholebatch.memory import MemoryMeter
from wholebatch.memory.fsdp_sharding import Sharding
from wholebatch.memory.predict import predict_peak

BUCKET = 1_000_000  # larger than any parameter, as 5e8 is for most models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 256), *(Block(256) for _ in range(6)), nn.Linear(256, 64))


def loss(model: Any, micro: Any) -> Any:
    return cross_entropy(model(micro["x"]), micro["y"])


def batch_of(samples: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(samples, 32), "y": torch.zeros(samples, dtype=torch.long)}


def measured(stage: int, size: int) -> int:
    import deepspeed

    model = made()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            "steps_per_print": 2**31,
        },
    )
    train = wb.WholeBatch(engine, engine.optimizer, loss=loss, micro_batch=size)
    batch = batch_of(2 * size)
    train.step(batch)
    gc.collect()
    zero = engine.optimizer
    flat = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    peaks = []
    for _ in range(3):  # A bucket that waits for the other rank is held longer.
        with MemoryMeter(model=model, optimizer=engine.basic_optimizer) as meter:
            meter.mark("parameters", flat)  # Nothing uses them before the step.
            train.step(batch)
        peaks.append(meter.peak)
    # The micro-batches are views of the batch, which a prediction counts one by one.
    return min(peaks) - sum(one.nbytes for one in batch.values()) // 2


def predicted(stage: Any, size: int) -> int:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters())
    sharding = Sharding(2, "every", zero=stage)
    return predict_peak(model, loss, batch_of(size), optimizer=optimizer, sharding=sharding).peak


CASES: list[tuple[Any, int]] = [(1, 16), (1, 320), (2, 16), (2, 320), (3, 16), (3, 320)]
"""Stages of ZeRO, each with a micro-batch whose peak is in the step, and one in the backward."""


def measured_peaks() -> dict[str, int]:
    """Return the peak of rank 0 for each case; call it on all ranks."""
    return {f"{stage} {size}": measured(stage, size) for stage, size in CASES}


def predicted_peaks() -> dict[str, int]:
    """Return the same, predicted; call it in a process without ranks."""
    return {f"{stage} {size}": predicted(stage, size) for stage, size in CASES}
