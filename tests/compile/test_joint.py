"""The traced micro-step makes the update of the undivided batch, whatever the model does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.compile.nets import (
    dropping,
    loss,
    mode_of,
    steps_of,
    total,
    traced,
)
from tests.support import Seen, Whole, distance, mlp, samples, sgd


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


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)


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


def test_dropout_draws_new_masks_for_every_micro_batch() -> None:
    torch.manual_seed(0)
    model = dropping()
    optimizer = sgd(model)
    train = traced(model, optimizer, loss=total, micro_batch=1)
    seen = Seen(model, optimizer)
    for _ in range(3):
        train.step(torch.ones(8, 64))
    assert mode_of(train) == "operations"
    values = set(seen.gradients[-1][0].flatten().tolist())
    assert len(values) > 4  # the mean of 8 masks; one mask for all would give 0 and 2 alone
    assert not torch.equal(seen.gradients[-1][0], seen.gradients[-2][0])


def test_windows_that_fail_leave_nothing_behind() -> None:
    model = mlp()
    whole = Whole(model)
    train = traced(model)
    for _ in range(2):
        whole.step(samples(10))
        train.step(samples(10))

    def fail(done: int, _: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.step(samples(10), after_micro=fail)
    assert all(parameter.grad is None for parameter in model.parameters())
    whole.step(samples(10))
    train.step(samples(10))
    assert mode_of(train) == "operations"
    whole.assert_same(model)


def test_a_module_with_two_names_keeps_its_own_tensors() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(5, 3)).double()
    own = [id(parameter) for parameter in layer.parameters()]
    whole = Whole(model)
    train = traced(model, loss=lambda m, micro: wb.cross_entropy(m(micro["x"]), micro["y"]))
    for number in (9, 9, 7, 9):
        whole.step(samples(number))
        train.step(samples(number))
    assert mode_of(train) == "operations"
    assert [id(parameter) for parameter in layer.parameters()] == own
    whole.assert_same(model)
