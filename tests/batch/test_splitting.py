"""Any nested batch into micro-batches by samples: nothing lost, order and types kept."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wholebatch.batch import split, to_device
from wholebatch.errors import OptionError, SplitError


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Plain:
    x: Any
    more: Any = None


@dataclass(frozen=True)
class Frozen:
    x: Any
    more: Any = None


@dataclass(slots=True)
class Slots:
    x: Any
    more: Any = None


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: Any
    more: Any = None


@dataclass
class Derived:
    x: Tensor
    doubled: Tensor = field(init=False)
    never_set: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.x * 2


class OwnMapping(MutableMapping[str, Any]):
    """Keeps its items in a dict of its own, so that copy.copy() shares them."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class OwnMappingThatCopies(OwnMapping):
    def __copy__(self) -> OwnMappingThatCopies:
        return OwnMappingThatCopies(dict(self.items_))


class OwnList(list):  # type: ignore[type-arg]
    pass


def assert_same(made: Any, expected: Any) -> None:
    """Equal in every value and in the type of every container."""
    assert type(made) is type(expected)
    if isinstance(expected, Tensor):
        assert made.dtype == expected.dtype
        assert torch.equal(made.to_dense(), expected.to_dense())
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(made, expected)
    elif isinstance(expected, collections.abc.Mapping):
        assert list(made) == list(expected)
        for key in expected:
            assert_same(made[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(made) == len(expected)
        for one, other in zip(made, expected, strict=True):
            assert_same(one, other)
    elif hasattr(expected, "__dataclass_fields__"):
        for name in expected.__dataclass_fields__:
            assert hasattr(made, name) == hasattr(expected, name)
            if hasattr(expected, name):
                assert_same(getattr(made, name), getattr(expected, name))
    else:
        assert made == expected


# A batch as a function of its samples: what a micro-batch must be is then simply built.
Build = Callable[[list[int]], Any]

UNCHANGED = [
    None,
    0.5,
    "a name",
    b"bytes",
    torch.tensor(3.0),
    torch.arange(101).view(1, -1),
    np.arange(103).reshape(1, -1),
    (224, 224),
    object(),
    torch.Size([3, 4]),
]


def _ids(rows: list[int], *shape: int) -> Tensor:
    ids = torch.tensor(rows, dtype=torch.float64).view(len(rows), *(1 for _ in shape))
    return ids.expand(len(rows), *shape) * 1000 + torch.arange(shape[-1] if shape else 1)


SPLIT_LEAVES: list[Build] = [
    lambda rows: torch.tensor(rows),
    lambda rows: _ids(rows, 7),
    lambda rows: _ids(rows, 2, 3),
    lambda rows: _ids(rows, 3, 2).transpose(1, 2),
    lambda rows: np.array(rows),
    lambda rows: np.array(rows, dtype=object),
    lambda rows: [f"sample {row}" for row in rows],
    lambda rows: tuple(f"sample {row}" for row in rows),
    lambda rows: OwnList(f"sample {row}" for row in rows),
    lambda rows: [{"id": row, "boxes": torch.full((row % 3, 4), row)} for row in rows],
    lambda rows: [torch.full((row + 20, 2), row) for row in rows],
    lambda rows: [Pair(row, str(row)) for row in rows],
    lambda rows: [[row] * (row % 4 + 20) for row in rows],
]


def _dict_of(parts: list[Build]) -> Build:
    return lambda rows: {f"k{i}": part(rows) for i, part in enumerate(parts)}


def _of_two(kind: Callable[[Any, Any], Any]) -> Callable[[tuple[Build, Build]], Build]:
    return lambda parts: lambda rows: kind(parts[0](rows), parts[1](rows))


def _containers(parts: st.SearchStrategy[Build]) -> st.SearchStrategy[Build]:
    some = st.lists(parts, min_size=1, max_size=3)
    two = st.tuples(parts, parts)
    return st.one_of(
        some.map(_dict_of),
        some.map(_dict_of).map(lambda d: lambda rows: collections.OrderedDict(d(rows))),
        some.map(_dict_of).map(lambda d: lambda rows: collections.UserDict(d(rows))),
        some.map(_dict_of).map(lambda d: lambda rows: OwnMappingThatCopies(d(rows))),
        some.map(_dict_of).map(lambda d: lambda rows: types.MappingProxyType(d(rows))),
        some.map(lambda ps: lambda rows: [p(rows) for p in ps]),
        some.map(lambda ps: lambda rows: OwnList(p(rows) for p in ps)),
        some.map(lambda ps: lambda rows: tuple(p(rows) for p in ps)),
        *(two.map(_of_two(kind)) for kind in (Pair, Plain, Frozen, Slots, FrozenSlots)),
    )


LEAVES = st.sampled_from(SPLIT_LEAVES + [lambda rows, v=v: v for v in UNCHANGED])
NESTED = st.recursive(LEAVES, _containers, max_leaves=8)


@given(
    inner=NESTED,
    leaf=st.sampled_from(SPLIT_LEAVES),
    samples=st.integers(5, 12),  # more than a generated container has parts, so no reading is open
    size=st.integers(1, 14),
)
def test_every_micro_batch_is_the_batch_of_its_samples(
    inner: Build, leaf: Build, samples: int, size: int
) -> None:
    def build(rows: list[int]) -> Any:
        return {"leaf": leaf(rows), "inner": inner(rows)}

    rows = list(range(samples))
    micro_batches = split(build(rows), size, batch_size=samples)
    chunks = [rows[start : start + size] for start in range(0, samples, size)]
    assert len(micro_batches) == len(chunks)
    for micro, chunk in zip(micro_batches, chunks, strict=True):
        assert_same(micro, build(chunk))


def test_samples_are_views_and_other_leaves_the_same_objects() -> None:
    x, array, weights, note = torch.randn(7, 3), np.zeros((7, 2)), torch.ones(1, 10), object()
    batch = {"x": x, "array": array, "aux": {"weights": weights, "note": note}}
    first, second, last = split(batch, 3)
    assert [len(micro["x"]) for micro in (first, second, last)] == [3, 3, 1]
    for start, micro in ((0, first), (3, second), (6, last)):
        assert micro["x"].data_ptr() == x[start:].data_ptr()
        assert micro["array"].base is array
        assert micro["aux"]["weights"] is weights
        assert micro["aux"]["note"] is note


def test_a_dataclass_keeps_fields_without_init_and_stays_frozen() -> None:
    first, second = split(Derived(torch.arange(4)), 3)
    assert first.doubled.tolist() == [0, 2, 4]
    assert second.doubled.tolist() == [6]
    assert not hasattr(second, "never_set")
    frozen = split(Frozen(torch.arange(4)), 3)[1]
    with pytest.raises(AttributeError):
        frozen.x = 0


def test_a_mapping_whose_copy_shares_its_items_is_refused_and_left_as_it_was() -> None:
    x = torch.arange(4)
    batch = OwnMapping({"x": x})
    with pytest.raises(SplitError, match=r"OwnMapping: its copy.copy\(\) shares its items"):
        split(batch, 2)
    assert batch["x"] is x


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "x", None, "auto"])
def test_an_impossible_micro_batch_is_refused(size: Any) -> None:
    with pytest.raises(OptionError) as caught:
        split({"x": torch.ones(4)}, size)
    assert str(caught.value) == (
        f"micro_batch={size!r}: must be a positive number of samples or wholebatch.tokens(budget)"
    )


@given(inner=NESTED)
def test_to_device_returns_the_same_objects_when_already_there(inner: Build) -> None:
    micro = inner(list(range(5)))
    assert to_device(micro, "cpu") is micro


@given(inner=NESTED)
def test_to_device_moves_every_tensor_and_nothing_else(inner: Build) -> None:
    micro = {"inner": inner([1, 2, 3, 4, 5]), "x": torch.ones(2), "n": np.ones(2), "s": "s"}
    moved = to_device(micro, "meta")
    assert type(moved["inner"]) is type(micro["inner"])
    assert moved["x"].device.type == "meta"
    assert moved["n"] is micro["n"]
    assert moved["s"] is micro["s"]
    assert micro["x"].device.type == "cpu"
    assert _devices(moved) <= {"meta"}


def _devices(node: Any) -> set[str]:
    if isinstance(node, Tensor):
        return {node.device.type}
    if isinstance(node, collections.abc.Mapping):
        return set().union(*map(_devices, node.values()))
    if isinstance(node, (list, tuple)):
        return set().union(*map(_devices, node))
    fields = getattr(node, "__dataclass_fields__", ())
    return set().union(*(_devices(getattr(node, name)) for name in fields))


@pytest.mark.gpu
def test_to_device_copies_to_cuda_through_pinned_memory() -> None:
    x, pinned = torch.randn(1000, 100), torch.randn(10).pin_memory()
    batch = {"x": x, "pinned": pinned, "sparse": torch.eye(3).to_sparse(), "n": 3}
    moved = to_device(batch, "cuda")
    assert torch.equal(moved["x"].cpu(), x)
    assert torch.equal(moved["pinned"].cpu(), pinned)
    assert torch.equal(moved["sparse"].to_dense().cpu(), torch.eye(3))
    assert to_device(moved, "cuda") is moved
    assert to_device(moved, "cpu")["x"].device.type == "cpu"
