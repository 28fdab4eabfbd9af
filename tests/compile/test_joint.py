"""The traced micro-step makes the update of the undivided batch, whatever the model does."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import (
    loss,
    mode_of,
    steps_of,
    traced,
)
from tests.support import Whole, distance, mlp, samples, sgd


def test_zeros_that_are_written_into_stay_apart() -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            first, second = (torch.zeros(5, dtype=x.dtype) for _ in range(2))
            first[0] = 1.0
            second[1] = 2.0
            out: Tensor = self.inner(x * first) + self.inner(x * second)
            return out

    model = Filled()
    whole, train = Whole(model), traced(model)
    for _ in range(3):
        whole.step(samples(10))
        train.step(samples(10))
    assert mode_of(train) == "operations"
    whole.assert_same(model)


def test_weights_are_cast_once_per_window() -> None:
    model = mlp(dtype=torch.float32)
    train = traced(model, micro_batch=2, precision="bf16")
    for _ in range(3):
        train.step(samples(8, dtype=torch.float32))
    (prepared,) = steps_of(train).values()
    casts = [
        node
        for node in prepared.joint._run.graph.nodes  # type: ignore[attr-defined]
        if node.target is torch.ops.aten._to_copy.default
        and node.args[0].op == "placeholder"
        and node.args[0].meta["val"].shape in {p.shape for p in model.parameters()}
    ]
    assert not casts
    assert len(train._runner.executor.memory.casts._copies) == 6


def test_sixteen_bit_parameters_are_added_in_fp32() -> None:
    model = mlp(dtype=torch.bfloat16)
    reference = copy.deepcopy(model)
    train = traced(model, micro_batch=1)
    eager = wb.WholeBatch(reference, sgd(reference), loss=loss, micro_batch=1, execute="eager")
    batch = samples(24, dtype=torch.bfloat16)
    for _ in range(2):
        train.step(batch)
        eager.step(batch)
    assert mode_of(train) == "operations"
    assert all(
        buffer.dtype is torch.float32
        for buffer in train._runner.executor.memory.gradients.of(range(6))
    )
    assert distance(model.parameters(), reference.parameters()) <= 1e-3
