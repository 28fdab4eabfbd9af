"""What a forward changes is put back: also what it replaces, and after out-of-memory."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.memory.inject import OutOfMemoryAt
from tests.support import loss, mlp, samples, sgd
from wholebatch.window.forward_state import ForwardState


class Changing(nn.Module):
    """Moves state of every kind in its forward, and depends on none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("replaced", torch.tensor(0))
        self.register_buffer("in_place", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("resized", torch.zeros(0))
        self.register_buffer("none", None)
        self.number, self.text, self.nothing = 0, "a", None
        self.tensor, self.array, self.items = torch.zeros(2), np.zeros(2), (1,)
        self.generator = torch.Generator().manual_seed(1)
        self.drawn = random.Random(1)
        self.output: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + len(x)
        self.in_place += x.detach().sum(0)
        self.resized.resize_(3).fill_(1.0)
        self.none = torch.ones(1)
        self.number += 1
        self.text += "b"
        self.nothing, self.new = len(x), 1
        self.tensor, self.array = self.tensor + 1, self.array + 1
        self.items = (*self.items, 2)
        torch.rand(1, generator=self.generator)
        torch.rand(1), random.random(), np.random.rand(), self.drawn.random()
        self.output = self.net(x)
        return self.output


def told(model: Changing) -> dict[str, Any]:
    kinds = (int, str, tuple, Tensor, np.ndarray, type(None))
    own = {k: v for k, v in vars(model).items() if not k.startswith("_") and isinstance(v, kinds)}
    own.pop("output", None)
    state = {
        **own,
        **model._buffers,
        "generator": model.generator.get_state(),
        "own": model.drawn.getstate(),
    }
    state["drawn"] = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
    return copy.deepcopy(state)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor | np.ndarray):
        return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_everything_is_put_back_into_the_same_objects() -> None:
    model, x = Changing(), samples(4)["x"]
    before, held = told(model), [model.replaced, model.tensor, model.items]
    state = ForwardState(model)
    for _ in range(2):  # a state may be put back more than once
        model(x)
        assert not same(told(model), before)
        state.restore()
        assert same(told(model), before)
        assert not hasattr(model, "new")
    now = [model.replaced, model.tensor, model.items]
    assert all(a is b for a, b in zip(held, now, strict=True))


def test_what_changes_inside_an_object_is_left() -> None:
    model = nn.Linear(1, 1)
    model.history = history = [1, [1]]  # type: ignore[assignment]
    model.tensor = torch.zeros(1)  # type: ignore[assignment]
    with ForwardState(model):
        model.history.append(2)
        model.history[1].append(2)
        model.tensor += 1
        model.history, model.tensor = [3], torch.ones(2)  # type: ignore[assignment]
    assert model.history is history
    assert model.history == [1, [1, 2], 2]
    assert float(model.tensor) == 1.0


@pytest.mark.parametrize("every", [7])
def test_after_an_out_of_memory_all_is_as_if_split_so_from_the_start(every: int) -> None:
    """At every seventh operation of a window: parameters, buffers and attributes."""

    def stepped(size: int, failure: OutOfMemoryAt | None) -> tuple[Changing, Any]:
        model = Changing()
        train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=size, audit=False)
        torch.manual_seed(8)
        random.seed(8)
        np.random.seed(8)
        if failure is None:
            train.step(samples(12))
        else:
            with failure:
                train.step(samples(12))
        return model, train

    everything = OutOfMemoryAt()
    stepped(8, everything)
    right, _ = stepped(4, None)
    recovered = 0
    for n in range(0, everything.seen, every):
        try:
            model, train = stepped(8, OutOfMemoryAt(n))
        except torch.OutOfMemoryError:
            continue  # in the close or the update, which no window repeats
        if not train.recoveries:
            continue
        recovered += 1
        assert same(told(model), told(right))
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), right.parameters(), strict=True)
        )
    assert recovered >= 8
