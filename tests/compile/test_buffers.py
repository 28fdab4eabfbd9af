"""Buffers that are there before the first gradient: eager code adds into them from the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.compile.nets import Tagger, mean_of_tokens, mode_of, tagged, traced
from tests.support import Whole
from wholebatch.compile import gradient_buffers
from wholebatch.compile.gradient_buffers import Gradients
from wholebatch.compile.graph_memory import GraphMemory


@pytest.fixture(autouse=True)
def _reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphMemory, "reserves_on", ("cpu",))


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    """What has a gradient, were it zero, is changed."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)


def test_no_second_set_of_gradients_is_made_and_unused_layers_have_none() -> None:
    model = Tagger().double()
    whole = Whole(model, decayed, loss=mean_of_tokens)
    train = traced(model, decayed(model))
    buffers = train._runner.executor

    def look(done: int, of: int) -> None:
        kept = [buffer.data_ptr() for buffer in buffers.memory.gradients._buffers.values()]
        made = [p.grad for p in model.parameters() if p.grad is not None]
        assert made
        assert all(gradient.data_ptr() in kept for gradient in made)
        assert model.spare.weight.grad is None

    for _ in range(3):
        whole.step(tagged(10))
        train.step(tagged(10), after_micro=look)
    assert mode_of(train) == "operations"
    whole.assert_same(model)


def test_buffers_count_their_own_changes() -> None:
    layers = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))]
    gradients = Gradients(layers)
    gradients.of((0, 1))
    gradients.lend()
    assert layers[0].grad is not None
    layers[0].grad.add_(1.0)
    gradients.take_back()
    assert torch.equal(layers[0].grad, torch.ones(3))
    assert layers[1].grad is None
    held = gradients.set_aside((0, 1))
    layers[0].grad.zero_()
    gradients.put_in_place((0, 1), held)
    found = [layer.grad for layer in layers]
    assert all(gradient is not None for gradient in found)
    assert [gradient.tolist() for gradient in found if gradient is not None] == [
        [1.0] * 3,
        [0.0] * 5,
    ]


def test_gradients_are_set_aside_on_the_device_if_it_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradient: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), nbytes=10)
    free = 0
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 130)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 120)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    assert gradient_buffers.room_for([gradient]).type == "cpu"
    free = 61  # 20 more are reserved; 10 are needed beside the 30 of a micro-step, twice
    assert gradient_buffers.room_for([gradient]).type == "cuda"
    assert gradient_buffers.room_for([]).type == "cpu"
