"""What is predicted is what a window of the library takes, to the byte, by every way of running."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from tests.memory.models import CASES, loss, mlp, vectors
from wholebatch.memory.meter import MemoryMeter
from wholebatch.memory.predict import Prediction, predict_peak

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

Optimizers = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def without_inputs(peak: int, by_category: dict[str, int]) -> int:
    """Micro-batches on the CPU are views of the batch: what is seen of that differs."""
    return peak - by_category["inputs"]


def really(train: wb.WholeBatch, model: nn.Module, optimizer: Any, batch: Any) -> int:
    """The peak of a third window: the first makes the optimizer's state, the second is tested."""
    train.step(batch)
    train.step(batch)
    with MemoryMeter(model=model, optimizer=optimizer) as meter:
        train.step(batch)
    return without_inputs(meter.peak, meter.peak_by_category)


def predicted(prediction: Prediction) -> int:
    return without_inputs(prediction.peak, prediction.by_category)


@pytest.mark.parametrize(
    ("name", "make", "size", "count", "precision"),
    [
        ("mlp", adamw, 4, 3, "full"),
        ("mlp", adamw, 4, 3, "bf16"),
        ("gpt", adamw, 16, 2, "full"),
        ("gpt-tied", sgd, 1, 2, "bf16"),
        ("gpt-dropout", sgd, 4, 3, "full"),
        ("gpt-checkpointed", adamw, 4, 4, "full"),
    ],
)
def test_one_after_the_other(
    name: str, make: Optimizers, size: int, count: int, precision: str
) -> None:
    case = CASES[name]
    model = case.make()
    optimizer = make(model.parameters())
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=loss,
        micro_batch=size,
        units=lambda micro: micro["y"].numel(),
        precision=precision,
        clip_norm=1.0,
    )
    found = predict_peak(
        model,
        loss,
        case.batch(size),
        optimizer=optimizer,
        precision=precision,
        micro_batches=count,
    )
    # The window keeps the total (4 bytes) and the units (8) of every micro-batch, and two numbers
    # of 4 bytes, one of them its seed.
    kept = 12 * (count - 1) + 2 * 4
    beyond = really(train, model, optimizer, case.batch(size * count)) - predicted(found)
    # Where the step is the peak, the window has let them go.
    assert beyond in (kept, 0), (beyond, kept)


@pytest.fixture
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(29_000 + os.getpid() % 900))
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_with_the_buckets_of_data_parallel_ranks() -> None:
    """A group of one rank reduces the same bytes; the window must only believe in two."""
    model = mlp(256)
    optimizer = sgd(model.parameters())
    train = wb.WholeBatch(DistributedDataParallel(model), optimizer, loss=loss, micro_batch=2)
    sync: Any = train._ledger.sync
    sync.ranks, of_one = 2, sync.group.sum
    sync.group.sum = lambda values: [2 * value for value in of_one(values)]
    train._fitting.recovers = False
    options: dict[str, Any] = {"optimizer": optimizer, "micro_batches": 2}
    found = predict_peak(model, loss, vectors(2), reduces=True, **options)
    # All buckets are on their way at once: a second copy of the gradients.
    assert found.by_category["communication"] == found.by_category["gradients"]
    assert found.peak > predict_peak(model, loss, vectors(2), **options).peak
    real = really(train, model, optimizer, vectors(4))
    # The bucket goes out while the piece of gradient that completed it is still there.
    last = model[0].weight.nbytes
    assert 0 <= real - predicted(found) <= 256 + last, (real, predicted(found))
