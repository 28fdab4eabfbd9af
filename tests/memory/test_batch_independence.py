"""Peak memory grows with the micro-batch, not with the batch."""

from __future__ import annotations

import torch

import wholebatch as wb
from tests.memory.models import loss, mlp, vectors
from wholebatch.memory import MemoryMeter


def peak_of_step(samples: int, *, micro_batch: int) -> int:
    """The peak of the second update, without the batch itself, which is the user's."""
    torch.manual_seed(0)
    model = mlp(512)
    optimizer = torch.optim.AdamW(model.parameters())
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro_batch)
    train.step(vectors(micro_batch))
    batch = vectors(samples)
    with MemoryMeter(model=model, optimizer=optimizer) as meter:
        step = train.step(batch)
    assert step.micro_batches == -(-samples // micro_batch)
    return meter.peak - meter.peak_by_category["inputs"]


def test_a_batch_64_times_as_large_takes_the_same_memory() -> None:
    small = peak_of_step(16, micro_batch=8)
    large = peak_of_step(1024, micro_batch=8)
    assert abs(large - small) < 0.01 * small
    assert peak_of_step(2048, micro_batch=1024) > 1.2 * small, "the measure does not move at all"
