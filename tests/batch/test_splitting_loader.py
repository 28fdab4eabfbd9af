"""Samplers repeat samples to fill a rank: over all ranks, each sample is seen exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from wholebatch.batch.lookahead_loader import generators_of, unpadded


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": torch.tensor(index), "x": torch.full((3,), index), "name": f"row {index}"}


def loaders(
    size: int, ranks: int, batch_size: int, *, drop_last: bool = False, **sampling: Any
) -> Iterator[DataLoader[Any]]:
    rows = Rows(size)
    for rank in range(ranks):
        sampler = DistributedSampler(rows, ranks, rank, **sampling)  # type: ignore[var-annotated]
        yield DataLoader(rows, batch_size=batch_size, sampler=sampler, drop_last=drop_last)


@given(
    size=st.integers(1, 40),
    ranks=st.integers(1, 9),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_over_all_ranks_each_sample_is_seen_once(
    size: int, ranks: int, batch_size: int, shuffle: bool, epoch: int
) -> None:
    seen: list[int] = []
    for loader in loaders(size, ranks, batch_size, shuffle=shuffle):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        clean = unpadded(loader)
        batches = list(clean)
        assert len(batches) == len(clean)  # type: ignore[arg-type]
        for batch in batches:
            ids = batch["id"].tolist()
            assert len(ids) > 0
            assert batch["x"].tolist() == [[i] * 3 for i in ids]
            assert batch["name"] == [f"row {i}" for i in ids]
            seen += ids
        assert [b["id"].tolist() for b in clean] == [b["id"].tolist() for b in batches]
    assert sorted(seen) == list(range(size))


def test_a_loader_that_resumes_by_itself_says_where_it_starts() -> None:
    *_, last = loaders(9, 2, 2, shuffle=False)  # rank 1 of 2: 1 3, 5 7, and 0 again
    assert [b["id"].tolist() for b in unpadded(last)] == [[1, 3], [5, 7]]

    class Resumed(DataLoader):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            rest = super().__iter__()
            next(rest)
            return rest

    resumed = Resumed(last.dataset, batch_size=2, sampler=last.sampler)
    assert [b["id"].tolist() for b in unpadded(resumed, start=1)] == [[5, 7]]


def test_a_static_leaf_is_not_dropped_with_the_repeat() -> None:
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": torch.stack([r["id"] for r in rows]), "weights": torch.ones(len(rows))}

    rows = Rows(5)
    sampler = DistributedSampler(rows, 2, 1, shuffle=False)  # type: ignore[var-annotated]
    loader = DataLoader(rows, batch_size=3, sampler=sampler, collate_fn=collate)
    (batch,) = unpadded(loader, static="weights")
    assert (batch["id"].tolist(), len(batch["weights"])) == ([1, 3], 3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_repeats_nothing_is_returned_as_it_is() -> None:
    rows = Rows(5)
    dropping = DistributedSampler(rows, 2, 1, drop_last=True)  # type: ignore[var-annotated]
    dividing = DistributedSampler(Rows(6), 2, 1)  # type: ignore[var-annotated]
    for loader in (
        DataLoader(rows, batch_size=2, shuffle=True),
        DataLoader(rows, batch_size=2, sampler=dropping),
        DataLoader(Rows(6), batch_size=2, sampler=dividing),
        DataLoader(Rows(6), batch_size=None, sampler=dividing),
        DataLoader(Stream(), batch_size=2),
        DataLoader(rows, batch_size=None),
        DataLoader(rows, batch_sampler=[[0, 1], [2]]),
        [{"x": torch.ones(2)}],
    ):
        assert unpadded(loader) is loader


class OwnOrder(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(super().__iter__())[::-1])


class OwnBatches(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[::-1])


def test_generators_of_a_loader_and_of_its_samplers() -> None:
    rows, own = Rows(5), torch.Generator()
    batches = BatchSampler(RandomSampler(rows, generator=own), 2, False)
    for loader in (
        DataLoader(rows, shuffle=True, generator=own),
        DataLoader(rows, sampler=RandomSampler(rows, generator=own)),
        DataLoader(rows, batch_sampler=batches),
    ):
        assert generators_of(loader) == [own]
    assert generators_of(DataLoader(rows, shuffle=True)) == generators_of([1, 2]) == []
