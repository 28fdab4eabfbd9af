"""Out of memory at 100 random operations of a window: update and buffers are exact, or refused.

The tests of the first window are on, so that some of the failures are in them.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.coupled.test_coupled_loss import Clip, encode
from tests.coupled.test_coupled_loss import batch as pairs
from tests.memory.inject import OutOfMemoryAt
from tests.support import EXACT, pieces, samples, sgd

SIZES = [5, 5, 3]
State = list[Tensor]


class Counted(nn.Module):
    """An MLP that counts the samples it has seen in a buffer."""

    count: Tensor

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), *layers, nn.Linear(8, 3))
        self.register_buffer("count", torch.zeros(()))
        self.double()
        made = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=made)

    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x)
        made: Tensor = self.layers(x)
        return made


def loss(model: nn.Module, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def whole(model: nn.Module, sizes: list[int], **options: Any) -> Any:
    """Return a WholeBatch that cuts its batch into these micro-batches."""
    train = wb.WholeBatch(model, sgd(model), micro_batch=max(sizes), **{"loss": loss, **options})
    if sizes != SIZES:
        train._fitting.split = lambda batch: pieces(batch, sizes)  # type: ignore[method-assign]
    torch.manual_seed(8)
    return train


def plain(sizes: list[int], failure: OutOfMemoryAt) -> tuple[nn.Module, list[int]]:
    """Train a model with dropout; return how its batch was cut in the end."""
    model = Counted(nn.Dropout(0.5))
    train = whole(model, sizes)
    with failure:
        train.step(samples(13))
    for cut in train._fitting.recovered:
        sizes = sizes.copy()
        sizes[cut.micro_batch : cut.micro_batch + 1] = [cut.into, cut.samples - cut.into]
    return model, sizes


def normed(sizes: list[int], failure: OutOfMemoryAt) -> tuple[nn.Module, list[int]]:
    """Train a model with BatchNorm, undivided: its blocks are checkpointed."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)]
    model = Counted(*blocks)
    train = whole(model, sizes)
    with failure:
        train.step(samples(13))
    return model, sizes


def compared(sizes: list[int], failure: OutOfMemoryAt) -> tuple[nn.Module, list[int]]:
    """Train two towers by a contrastive loss."""
    model = Clip()

    def of_all(made: Any) -> wb.Loss:
        return wb.losses.clip_loss(made["image"], made["text"], scale=model.log_scale.exp())

    train = whole(model, sizes, loss=wb.Coupled(encode, of_all))
    with failure:
        train.step(pairs(13))
    return model, sizes


def looped(sizes: list[int], failure: OutOfMemoryAt) -> tuple[nn.Module, list[int]]:
    """Train by acc.run; a window that ran out of memory is discarded and made again."""
    model = Counted(nn.Tanh())
    acc = wb.Accumulator(model, sgd(model), steps=len(sizes))
    with failure:
        for _ in range(2):
            model.count.zero_()
            try:
                for micro in pieces(samples(13), sizes):
                    acc.run(lambda micro: loss(model, micro), micro)
                break
            except torch.OutOfMemoryError:
                acc.discard()
    return model, sizes


def state(model: nn.Module) -> State:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@pytest.fixture
def _quick_collections() -> Iterator[None]:
    """Every recovery collects garbage: what is there before need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_collections")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", [plain, normed, compared, looped])
def test_a_failure_anywhere_is_recovered_or_raised(
    run: Callable[[list[int], OutOfMemoryAt], tuple[nn.Module, list[int]]],
) -> None:
    run(SIZES, OutOfMemoryAt())  # what a process does once only is not counted
    everything = OutOfMemoryAt()
    right = {tuple(SIZES): state(run(SIZES, everything)[0])}
    places = random.Random(0).sample(range(everything.seen), 25)
    refused = 0
    for place in places:
        failure = OutOfMemoryAt(place)
        try:
            model, sizes = run(SIZES, failure)
        except torch.OutOfMemoryError:
            refused += 1  # in the close or the update, which are never repeated
            continue
        assert failure.failed_at is not None
        if tuple(sizes) not in right:
            right[tuple(sizes)] = state(run(sizes, OutOfMemoryAt())[0])
        for found, expected in zip(state(model), right[tuple(sizes)], strict=True):
            gap = torch.linalg.vector_norm((found - expected).double())
            assert gap <= EXACT * expected.double().norm(), (place, failure.failed_at)
    assert len(places) - refused > 10
