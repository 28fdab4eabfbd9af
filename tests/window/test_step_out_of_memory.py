"""An optimizer's step that runs out of memory: refused until a checkpoint is loaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import wholebatch as wb
from tests.support import mlp, samples, summed


class RunsOut(torch.optim.SGD):
    """Updates the first parameters, and then runs out of memory, as often as it is told to."""

    failures = 0
    changes = 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.failures:
            self.failures -= 1
            for parameter in self.param_groups[0]["params"][: self.changes]:
                parameter.add_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return super().step(closure)


@pytest.mark.parametrize("changes", [0, 2])
def test_it_is_said_and_nothing_goes_on_before_a_checkpoint_is_loaded(changes: int) -> None:
    model, batch = mlp(), samples(6)
    optimizer = RunsOut(model.parameters(), lr=0.1, momentum=0.9)
    acc = wb.Accumulator(model, optimizer, steps=1)
    acc.backward(summed(model, batch), units=6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.failures, optimizer.changes = 1, changes
    with pytest.raises(
        torch.OutOfMemoryError, match=r"step ran out of memory \(CUDA out of memory\.\), and may"
    ):
        acc.backward(summed(model, batch), units=6)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(wb.errors.WindowError, match="load the model and the optimizer"):
        acc.backward(summed(model, batch), units=6)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step = acc.backward(summed(model, batch), units=6)
    assert step is not None
    assert step.update == 2
