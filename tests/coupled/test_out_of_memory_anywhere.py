"""Out of memory at 100 random operations of a window: update and buffers are exact, or refused.

The tests of the first window are on, so that some of the failures are in them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.coupled.test_coupled_loss import Clip, encode
from tests.coupled.test_coupled_loss import batch as pairs
from tests.memory.inject import OutOfMemoryAt
from tests.support import EXACT, loss, pieces, samples, sgd

MICRO, SIZES = 5, [5, 5, 3]
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


def whole(model: nn.Module, micro: int, **options: Any) -> Any:
    train = wb.WholeBatch(model, sgd(model), micro_batch=micro, **{"loss": loss, **options})
    torch.manual_seed(8)
    return train


def plain(micro: int, failure: OutOfMemoryAt) -> tuple[nn.Module, int]:
    """Train a model with dropout; return the size of its micro-batches in the end."""
    model = Counted(nn.Dropout(0.5))
    train = whole(model, micro)
    with failure:
        train.step(samples(13))
    return model, min([micro, *(cut.into for cut in train._fitting.recovered)])


def compared(micro: int, failure: OutOfMemoryAt) -> tuple[nn.Module, int]:
    """Train two towers by a contrastive loss."""
    model = Clip()

    def of_all(made: Any) -> wb.Loss:
        return wb.losses.clip_loss(made["image"], made["text"], scale=model.log_scale.exp())

    train = whole(model, micro, loss=wb.Coupled(encode, of_all))
    with failure:
        train.step(pairs(13))
    return model, micro


def looped(micro: int, failure: OutOfMemoryAt) -> tuple[nn.Module, int]:
    """Train by acc.run; a window that ran out of memory is discarded and made again."""
    model = Counted(nn.Tanh())
    acc = wb.Accumulator(model, sgd(model), steps=len(SIZES))
    with failure:
        for _ in range(2):
            model.count.zero_()
            try:
                for part in pieces(samples(13), SIZES):
                    acc.run(lambda part: loss(model, part), part)
                break
            except torch.OutOfMemoryError as error:
                if "the optimizer's step ran out of memory" in str(error):
                    raise
                acc.discard()
    return model, micro


def state(model: nn.Module) -> State:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_collections")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", [plain, compared, looped])
def test_a_failure_anywhere_is_recovered_or_raised(
    run: Callable[[int, OutOfMemoryAt], tuple[nn.Module, int]],
) -> None:
    run(MICRO, OutOfMemoryAt())  # what a process does once only is not counted
    everything = OutOfMemoryAt()
    right = {MICRO: state(run(MICRO, everything)[0])}
    places = random.Random(0).sample(range(everything.seen), 25)
    refused = 0
    for place in places:
        failure = OutOfMemoryAt(place)
        try:
            model, micro = run(MICRO, failure)
        except torch.OutOfMemoryError:
            refused += 1  # in the close or the update, which are never repeated
            continue
        assert failure.failed_at is not None
        if micro not in right:
            right[micro] = state(run(micro, OutOfMemoryAt())[0])
        for found, expected in zip(state(model), right[micro], strict=True):
            gap = torch.linalg.vector_norm((found - expected).double())
            assert gap <= EXACT * expected.double().norm(), (place, failure.failed_at)
    assert len(places) - refused > 10
