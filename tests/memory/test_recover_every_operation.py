"""Out of memory at every operation of a window: the update of the same split without failure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.memory.inject import OutOfMemoryAt
from tests.support import loss, samples, sgd


def plain() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()


def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(5, 8),
        nn.BatchNorm1d(8, track_running_stats=True),
        nn.Dropout(0.5),
        nn.Linear(8, 3),
    ).double()


def run(make: Any, policy: str, size: int, failure: OutOfMemoryAt | None) -> Any:
    model = make()
    train = wb.WholeBatch(
        model, sgd(model), loss=loss, micro_batch=size, batchnorm=policy, audit=False
    )
    torch.manual_seed(8)
    if failure is None:
        train.step(samples(12))
    else:
        with failure:
            train.step(samples(12))
    return [t.detach().clone() for t in model.state_dict().values()], train


@pytest.mark.slow
@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize(("make", "policy"), [(plain, "exact"), (normed, "allow")])
def test_a_failure_at_every_operation(make: Any, policy: str) -> None:
    run(make, policy, 8, None)  # what a process does once only is not counted
    everything = OutOfMemoryAt()
    run(make, policy, 8, everything)
    right, _ = run(make, policy, 4, None)
    recovered = failed_in_the_step = 0
    for n in range(everything.seen):
        failure = OutOfMemoryAt(n)
        try:
            state, train = run(make, policy, 8, failure)
        except torch.OutOfMemoryError:
            failed_in_the_step += 1  # the close and the update are never inside a retry
            continue
        assert failure.failed_at is not None
        assert train.recoveries == 1
        recovered += 1
        assert all(torch.equal(a, b) for a, b in zip(state, right, strict=True)), n
    assert recovered > 40
    assert failed_in_the_step < everything.seen / 2
