"""A batch depends on its place alone; nothing is left out, and resuming goes straight there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from wholebatch.cli.recipes.recipe_batches import Batches, EmptyShare, Position
from wholebatch.errors import RecipeError, StateError


class Noisy:
    """Samples that draw from all three generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> list[float]:
        return [index, torch.rand(()).item(), random.random(), numpy.random.rand()]


class Stream(IterableDataset[list[float]]):
    def __iter__(self) -> Iterator[list[float]]:
        noisy = Noisy()
        return (noisy[index] for index in range(len(noisy)))


SOURCES = {
    "dataset": Noisy,
    "loader": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),  # type: ignore[arg-type]
    "loader with a generator": lambda: DataLoader(
        Noisy(),  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(7),
    ),
    "loader of a stream": lambda: DataLoader(Stream(), batch_size=4),
}


def batches(source: str, seed: int = 5) -> Batches:
    return Batches(SOURCES[source], batch_size=4, seed=seed, collate=torch.tensor)


def as_lists(batch: Any) -> Any:
    return torch.stack(batch, 1).tolist() if isinstance(batch, list) else batch.tolist()


@pytest.mark.parametrize("source", SOURCES)
def test_every_epoch_has_every_sample_once_and_the_short_batch_too(source: str) -> None:
    feed = batches(source)
    for _ in range(3):
        epoch = [as_lists(feed.take()) for _ in range(3)]
        assert [len(batch) for batch in epoch] == [4, 4, 3]
        assert sorted(sample[0] for batch in epoch for sample in batch) == list(range(11))
    assert feed.position == Position(2, 3)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("taken", [0, 2, 3, 7])
def test_goes_on_at_any_place_with_the_same_batches(source: str, taken: int) -> None:
    straight = batches(source)
    for _ in range(taken):
        straight.take()
    state = deepcopy(straight.state_dict())
    torch.manual_seed(99)  # whatever the model draws in between changes nothing
    random.seed(99)
    resumed = batches(source)
    resumed.load_state_dict(state)
    for _ in range(5):
        assert as_lists(straight.take()) == as_lists(resumed.take())
    assert straight.position == resumed.position


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("collate", "ranks"), [(torch.tensor, 2), (torch.tensor, 5), (None, 3)])
def test_shares_of_ranks_are_the_batch_of_one(source: str, collate: Any, ranks: int) -> None:
    """The same samples in the same order, each of them once."""

    def feed(rank: int, ranks: int) -> Batches:
        build = SOURCES[source]
        return Batches(build, batch_size=4, seed=5, collate=collate, rank=rank, ranks=ranks)

    whole, shares = feed(0, 1), [feed(rank, ranks) for rank in range(ranks)]
    for _ in range(5):
        expected = as_lists(whole.take())
        taken = [share.take() for share in shares]
        parts = [[] if isinstance(part, EmptyShare) else as_lists(part) for part in taken]
        assert [sample[0] for part in parts for sample in part] == [it[0] for it in expected]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        for empty in (part for part in taken if isinstance(part, EmptyShare)):
            assert as_lists(empty.like)[0][0] in [sample[0] for sample in expected]


@pytest.mark.parametrize("source", ["loader of a stream", "loader"])
def test_peeking_changes_nothing(source: str) -> None:
    plain, peeking = batches(source), batches(source)
    for _ in range(7):
        peeked = as_lists(peeking.peek())
        resumed = batches(source)
        resumed.load_state_dict(deepcopy(peeking.state_dict()))
        assert as_lists(resumed.take()) == peeked
        assert as_lists(peeking.take()) == as_lists(plain.take()) == peeked


def test_the_model_s_random_numbers_are_left_alone() -> None:
    feed = batches("dataset")
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    expected = (torch.rand(()).item(), random.random(), numpy.random.rand())
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    feed.take()
    assert (torch.rand(()).item(), random.random(), numpy.random.rand()) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "is empty"),
        ((torch.ones(3), torch.ones(3)), r"a tuple of columns; return samples"),
        ({"x": torch.ones(3)}, r"a dict of columns"),
        (7, "returned a int; return a dataset"),
        (iter(()), "or a DataLoader, of a stream too"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Batches(lambda: data, batch_size=2, seed=0).take()


def test_other_data_is_noticed_when_resuming() -> None:
    feed = Batches(lambda: list(range(10)), batch_size=4, seed=0)
    longer = Batches(lambda: list(range(12)), batch_size=4, seed=0)
    with pytest.raises(StateError, match=r"was on a dataset of 10 samples, and data\(\) now gives"):
        longer.load_state_dict(feed.state_dict())
    stream = Batches(lambda: DataLoader(range(10), 4), batch_size=4, seed=0)  # type: ignore[arg-type]
    for _ in range(3):
        stream.take()
    shorter = Batches(lambda: DataLoader(range(5), 4), batch_size=4, seed=0)  # type: ignore[arg-type]
    shorter.load_state_dict(stream.state_dict())
    with pytest.raises(StateError, match="epoch 0 ended after 2 batches, but the run had used 3"):
        shorter.take()


def test_the_checksum_of_the_data_is_that_of_samples_that_stay() -> None:
    def of(build: Any) -> str | None:
        return Batches(build, batch_size=2, seed=5, collate=torch.tensor).fingerprint

    assert of(Noisy) == of(Noisy)  # drawn by generators that are seeded
    assert of(SOURCES["loader of a stream"]) is None
    assert of(lambda: [[1.0], [2.0], [3.0]]) != of(lambda: [[1.0], [2.5], [3.0]])
    other = numpy.random.default_rng()

    class Drawn(Noisy):
        def __getitem__(self, index: int) -> list[float]:
            return [index, other.random(), 0.0, 0.0]

    assert of(Drawn) is None  # other samples each time: nothing can be said of them
