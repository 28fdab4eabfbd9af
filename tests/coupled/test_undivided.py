"""Exact BatchNorm: the batch is not split, and saves memory by checkpointing when it must."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.coupled.networks import NETWORKS, resnet
from tests.coupled.windows import Images, batch, mean
from tests.memory.inject import OutOfMemoryAt
from tests.support import EXACT, Seen, Whole, distance, loss, sgd
from wholebatch.batch import Batches
from wholebatch.errors import UnsupportedError


def buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.double() for buffer in model.buffers()]


def same_as_whole(model: nn.Module, seen: Seen, undivided: Whole) -> None:
    undivided.assert_same(model, seen)
    assert distance(buffers(model), buffers(undivided.model)) <= EXACT


@pytest.mark.parametrize("micro_batch", [5, "auto"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_running_statistics_are_those_of_plain_torch(
    name: str, micro_batch: Any
) -> None:
    model = NETWORKS[name]().double()
    undivided, optimizer = Whole(model, loss=mean), sgd(model)
    seen = Seen(model, optimizer)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro_batch)
    for number in (12, 7):
        undivided.step(batch(number, seed=number))
        step = train.step(batch(number, seed=number))
        assert step.micro_batches == 1
    same_as_whole(model, seen, undivided)
    assert train.micro_batch_size == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet"])
def test_out_of_memory_at_any_operation_checkpoints_the_blocks(name: str) -> None:
    """The window begins again, and nothing of the failed attempt is left."""
    start = NETWORKS[name]().double()
    undivided = Whole(start, loss=mean)
    undivided.step(batch(8))

    def run(failure: OutOfMemoryAt) -> tuple[nn.Module, Seen, Any]:
        model = copy.deepcopy(start)
        optimizer = sgd(model)
        seen = Seen(model, optimizer)
        train = wb.WholeBatch(model, optimizer, loss=loss, audit=False)
        with failure:
            train.step(batch(8))
        return model, seen, train

    everything = OutOfMemoryAt()
    run(everything)
    recovered = 0
    for n in range(0, everything.seen, 7):
        try:
            model, seen, train = run(OutOfMemoryAt(n))
        except torch.OutOfMemoryError:  # in the close, which is not repeated
            continue
        if train._fitting._undivided.place == 1:
            recovered += 1
        same_as_whole(model, seen, undivided)
    assert recovered >= everything.seen // 14


def test_a_batch_that_does_not_fit_is_refused_with_the_ways_out() -> None:
    model = resnet().double()
    before = [t.clone() for t in model.state_dict().values()]

    def fails(model: nn.Module, micro: Images) -> wb.Loss:
        model(micro["x"])
        raise torch.OutOfMemoryError("no room")

    train = wb.WholeBatch(model, sgd(model), loss=fails)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train.step(batch(8))
    said = str(raised.value)
    assert "does not fit with 2 blocks checkpointed (no room)" in said
    for way in ('batchnorm="freeze"', 'batchnorm="allow"', "GroupNorm", "more ranks"):
        assert way in said
    assert all(map(torch.equal, before, model.state_dict().values()))


def test_given_micro_batches_are_not_used_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = resnet().double()
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=4)
    with caplog.at_level(logging.WARNING, "wholebatch"):
        train.step(batch(8))
        train.step(batch(8))
    assert [r.message for r in caplog.records if "the batch is not split" in r.message] == [
        "micro_batch=4: a BatchNorm trains with the statistics of the whole batch, so the batch is "
        "not split; if it does not fit, its blocks are checkpointed"
    ]
    model.eval()
    assert train.step(batch(8)).micro_batches == 2


def test_several_batches_are_joined_or_refused() -> None:
    model = resnet().double()
    undivided, optimizer = Whole(model, loss=mean), sgd(model)
    seen = Seen(model, optimizer)
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=4)
    data = batch(12)
    undivided.step(data)
    parts = [{name: leaf[some] for name, leaf in data.items()} for some in (slice(7), slice(7, 12))]
    assert train.step(Batches(parts)).micro_batches == 1
    same_as_whole(model, seen, undivided)
    parts[1]["x"] = parts[1]["x"][..., :5]
    with pytest.raises(UnsupportedError, match="2 batches that cannot be joined into one"):
        train.step(Batches(parts))
