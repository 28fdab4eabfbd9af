"""What a forward changes is put back: also what it replaces, and after out-of-memory."""

from __future__ import annotations

import copy
import random
from collections import deque
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
        self.tensor = torch.zeros(2)
        self.array = np.zeros(2)
        self.items: list[Any] = [1, torch.zeros(2)]
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.table: dict[str, Any] = {"a": torch.zeros(2), "b": [1]}
        self.names = {"a"}
        self.generator = torch.Generator().manual_seed(1)
        self.output: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + len(x)
        self.in_place += x.detach().sum(0)
        self.resized.resize_(3).fill_(1.0)
        self.none = torch.ones(1)
        self.number += 1
        self.text += "b"
        self.nothing, self.new = len(x), 1
        self.tensor += 1
        self.array += 1
        self.items[1] += 1
        self.items.append(2)
        self.recent.append(len(x))
        self.table["a"] += 1
        self.table["b"].append(2)
        self.table["c"] = 3
        self.names.add("b")
        torch.rand(1, generator=self.generator)
        torch.rand(1), random.random(), np.random.rand()
        self.output = self.net(x)
        return self.output


def told(model: Changing) -> dict[str, Any]:
    kinds = (int, str, list, deque, dict, set, Tensor, np.ndarray, type(None))
    own = {k: v for k, v in vars(model).items() if not k.startswith("_") and isinstance(v, kinds)}
    own.pop("output", None)
    state = {**own, **model._buffers, "generator": model.generator.get_state()}
    state["drawn"] = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
    return copy.deepcopy(state)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor | np.ndarray):
        return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_everything_is_put_back_into_the_same_objects() -> None:
    model, x = Changing(), samples(4)["x"]
    before, held = told(model), [model.replaced, model.tensor, model.items, model.table["a"]]
    state = ForwardState(model)
    for _ in range(2):  # a state may be put back more than once
        model(x)
        assert not same(told(model), before)
        state.restore()
        assert same(told(model), before)
        assert not hasattr(model, "new")
    now = [model.replaced, model.tensor, model.items, model.table["a"]]
    assert all(a is b for a, b in zip(held, now, strict=True))


def test_what_moved_is_told_and_single_items_can_be_put_back() -> None:
    model, x = Changing(), samples(4)["x"]
    state = ForwardState(model)
    model(x)
    after = ForwardState(model)
    moved = {name for _, name in state.moved(after)}
    assert moved >= {"replaced", "in_place", "number", "items", "table", "array", "new", "recent"}
    assert "net" not in moved
    state.restore(only=[(id(model), "number")])
    assert model.number == 0
    assert model.text == "ab"
    assert [name for _, name in ForwardState(model).moved(after)] == ["number"]


def test_many_containers_in_a_container_are_compared_by_identity() -> None:
    model = nn.Linear(1, 1)
    history: list[list[int]] = [[k] for k in range(300)]
    model.history = history  # type: ignore[assignment]
    before = ForwardState(model)
    assert before.moved(ForwardState(model)) == []
    history[7] = [7]
    assert before.moved(ForwardState(model)) == [(id(model), "history")]
    before.restore()


def test_the_books_of_an_engine_are_not_the_models() -> None:
    wrapped = torch.nn.parallel.DataParallel(mlp())
    state = ForwardState(wrapped)
    wrapped.dim = 7
    state.restore()
    assert wrapped.dim == 7


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


def test_what_has_not_changed_is_not_written() -> None:
    class Counted(list[int]):
        def extend(self, values: Any) -> None:
            raise AssertionError("the user's own method")

    model = nn.Linear(1, 1)
    array = np.zeros(2)
    array.setflags(write=False)
    model.array, model.tensor = array, torch.zeros(2)  # type: ignore[assignment]
    model.counted, model.inner = Counted([1]), {"deep": [torch.zeros(1), 2]}  # type: ignore[assignment]
    state, versions = ForwardState(model), (model.tensor._version,)
    state.restore()
    assert versions == (model.tensor._version,)
    model.counted.append(2)
    state.restore()
    assert list(model.counted) == [1]


def test_a_users_own_generator_and_object_are_told_apart() -> None:
    model = nn.Linear(1, 1)
    model.drawn = random.Random(1)  # type: ignore[assignment]
    model.thing = object()  # type: ignore[assignment]
    first = ForwardState(model)
    thing, number = object(), model.drawn.random()
    model.thing = thing  # type: ignore[assignment]
    assert [name for _, name in first.moved(ForwardState(model))] == ["drawn"]
    first.restore()
    assert model.drawn.random() == number
    assert model.thing is thing
