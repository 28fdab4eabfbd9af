"""Whole batches from a recipe's data, in an order that does not depend on earlier batches.

The order of a dataset in epoch e is a permutation made from (seed, e). Random numbers that a sample
draws are seeded by its position. So batch b of epoch e is always the same, whatever ran before it
and on any number of ranks: resuming goes straight there. A stream has to be read again from its
start to the same position.

With several ranks, each takes its share of every batch. With torch's own collate, a rank reads only
its own samples. A recipe's own `collate` gets the whole batch (it may pad to the longest sample, or
draw random numbers), and each rank takes its slice of the result. A stream is sliced the same way.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from wholebatch.batch.samples import layout_of
from wholebatch.errors import RecipeError, StateError
from wholebatch.tune.batch_scaling import share_of
from wholebatch.window.forward_state import capture_python_random, restore_random, same_random


@dataclass(frozen=True)
class Position:
    """The position of a batch: number `batch` of epoch `epoch`, both from 0."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Nothing:
    """The empty share of a batch with fewer samples than ranks; `like` is a batch of one sample."""

    like: Any


class Batches(Dataset[Any]):
    """The batches of a recipe, one per `take()`, over any number of epochs.

    `build` makes the data: a dataset (a length and an index), an iterable of samples, or a
    DataLoader, whose batches are used as they are. The last batch of an epoch may be short; it is
    never dropped. With `ranks`, `take()` returns the share of `rank`, or `Nothing`.

    After `follow(size_at)`, `size_at(epoch)` is called for the size of every batch.
    """

    def __init__(
        self,
        build: Callable[[], Any],
        *,
        batch_size: int,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 0,
        name: str = "data",
    ) -> None:
        self.position = Position()
        self._name = name
        self.batch_size = batch_size
        self._size_at: Callable[[int], int] | None = None
        self._past = _Past()
        self._rank, self._ranks = rank, ranks
        self._build = build
        self._seed = seed
        self._collate = collate or default_collate
        with self._seeded("data"):
            self._data = build()
        self.kind = _kind_of(self._data)
        self.length = len(self._data) if self.kind == "dataset" else None
        if self.length == 0:
            raise RecipeError(f"the recipe's {self._name}() is empty")
        self._order: Tensor | None = None
        self._iterator: Iterator[Any] | None = None
        self._in_epoch = 0  # Batches taken from the iterator.
        self._peeked: tuple[Any] | None = None
        self._draws = False  # True once a sample has drawn random numbers.
        self._workers = workers if self.kind == "dataset" else 0
        self._ahead: Iterator[Any] | None = None  # Batches that workers have read.

    @property
    def loader_batch_size(self) -> int | None:
        """The batch size of a DataLoader; None for other data."""
        return self._data.batch_size if self.kind == "loader" else None

    @property
    def samples(self) -> int:
        """The number of samples of this epoch taken so far."""
        return self._past.samples

    def follow(self, size_at: Callable[[int], int]) -> None:
        """Call `size_at(epoch)` for the size of every batch, from the one at `position` on."""
        self._size_at = size_at
        self._iterator = self._peeked = self._ahead = None

    def peek(self) -> Any:
        """Return the batch at `position` without moving on; the next `take` returns the same."""
        if self._peeked is None:
            if self.reads_ahead:
                batch = self._from_workers()
            elif self.kind == "dataset":
                batch = self._from_dataset()
            else:
                batch = self._part(self._from_stream())
            self._peeked = (batch,)
        return self._peeked[0]

    def take(self) -> Any:
        """Return the batch at `position`, and move on to the next."""
        batch = self.peek()
        self._peeked = None
        self._past.add(self.batch_size)
        self.position = Position(self.position.epoch, self.position.batch + 1)
        return batch

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Return a position in the data, with the kind and length that identify the data."""
        return {
            "kind": self.kind,
            "length": self.length,
            "epoch": position.epoch,
            "batch": position.batch,
            "sizes": self._past.of(position),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        if (state["kind"], state["length"]) != (self.kind, self.length):
            raise StateError(
                f"the data has changed: the run was on {_described(state['kind'], state['length'])}"
                f", and data() now gives {_described(self.kind, self.length)}"
            )
        self.position = Position(state["epoch"], state["batch"])
        runs = state.get("sizes", [[self.batch_size, state["batch"]]])
        self._past = _Past(self.position.epoch, [list(run) for run in runs])
        self._order = self._iterator = self._peeked = self._ahead = None

    @property
    def reads_ahead(self) -> bool:
        """True if workers read: a dataset, in batches whose sizes are known beforehand."""
        return self._workers > 0 and self._size_at is None

    def _from_workers(self) -> Any:
        """Return the batch at `position` from processes that read some batches ahead.

        What a batch holds follows from its position alone, so it is the same as without workers.
        """
        assert self.length is not None
        if self._past.samples >= self.length:
            self._next_epoch()
        if self._ahead is None:
            loader: DataLoader[Any] = DataLoader(
                copy.copy(self),
                sampler=self._positions(),
                batch_size=None,
                num_workers=self._workers,
                collate_fn=_unchanged,
            )
            with self._seeded("workers"):  # A loader draws a seed for its workers.
                self._ahead = iter(loader)
        return next(self._ahead)

    def _positions(self) -> Iterator[Position]:
        """Yield the positions of all batches from this one on."""
        assert self.length is not None
        epoch, batch = self.position.epoch, self.position.batch
        while True:
            for place in range(batch, -(-self.length // self.batch_size)):
                yield Position(epoch, place)
            epoch, batch = epoch + 1, 0

    def __getitem__(self, position: Position) -> Any:
        """Return the batch at a position of a dataset, for workers; all before have one size."""
        if position.epoch != self.position.epoch:
            self._order = None
        self.position = position
        self._past = _Past(position.epoch, [[self.batch_size, position.batch]])
        return self._from_dataset()

    def _next_epoch(self) -> None:
        self.position = Position(self.position.epoch + 1, 0)
        self._past = _Past(self.position.epoch, before=self._past)
        self._order = None

    def _resize(self) -> None:
        if self._size_at is not None:
            self.batch_size = self._size_at(self.position.epoch)

    def _from_dataset(self) -> Any:
        assert self.length is not None
        if self._past.samples >= self.length:
            self._next_epoch()
        self._resize()
        if self._order is None:
            generator = torch.Generator().manual_seed(_mixed(self._seed, self.position.epoch))
            self._order = torch.randperm(self.length, generator=generator)
        start = self._past.samples
        chosen = self._order[start : start + self.batch_size].tolist()
        if self._ranks == 1 or self._collate is not default_collate:
            return self._part(self._read(chosen, start))
        mine = share_of(len(chosen), rank=self._rank, ranks=self._ranks)
        if not chosen[mine]:
            return Nothing(self._read(chosen[:1], start))
        return self._read(chosen[mine], start + mine.start)

    def _read(self, chosen: list[int], place: int) -> Any:
        """Read and collate samples; `place` is the first one's position in the epoch's order."""
        with self._seeded("batch"):
            samples = None if self._draws else self._read_at_once(chosen)
            if samples is None:
                # Seed each sample: a rank that reads only its share then draws the same.
                samples = []
                for offset, index in enumerate(chosen):
                    reseed(_mixed(self._seed, self.position.epoch, "sample", place + offset))
                    samples.append(self._data[index])
            reseed(_mixed(self._seed, self.position.epoch, "collate", self.position.batch))
            return self._put_together(samples)

    def _put_together(self, samples: list[Any]) -> Any:
        """Collate the samples into a batch; torch's collate accepts only samples of one shape."""
        if self._collate is not default_collate:
            return self._collate(samples)
        try:
            return default_collate(samples)
        except Exception as error:
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            raise RecipeError(
                f"the samples of data() cannot be put together as they are ({reason}): give the "
                "recipe a function collate(samples) that makes a batch of them, or make them alike"
            ) from error

    def _read_at_once(self, chosen: list[int]) -> list[Any] | None:
        """Read the samples without seeding; return None if one drew random numbers."""
        before = _generators()
        if callable(getattr(self._data, "__getitems__", None)):  # torch's method for many samples.
            samples = list(self._data.__getitems__(chosen))
        else:
            samples = [self._data[index] for index in chosen]
        self._draws = not same_random(before, _generators())
        return None if self._draws else samples

    def _part(self, batch: Any) -> Any:
        """Return the share of this rank in a whole batch."""
        if self._ranks == 1:
            return batch
        layout = layout_of(batch)
        mine = share_of(layout.size, rank=self._rank, ranks=self._ranks)
        if mine.start == mine.stop:
            return Nothing(layout.take(slice(0, 1)))
        return layout.take(mine)

    def _from_stream(self) -> Any:
        if self._iterator is None:
            self._restart()
        # When resuming, read up to the position in batches of the same sizes as before.
        for size in islice(self._past.sizes(), self._in_epoch, None):
            if self._next(size) is None:
                raise StateError(
                    f"the data has changed: epoch {self.position.epoch} ended after "
                    f"{self._in_epoch} batches, and the run had taken {self.position.batch}"
                )
        self._resize()
        batch = self._next(self.batch_size)
        if batch is None:
            if self._in_epoch == 0:
                raise RecipeError(f"the recipe's {self._name}() is empty")
            self._next_epoch()
            self._resize()
            self._restart()
            batch = self._next(self.batch_size)
            if batch is None:
                raise RecipeError("the recipe's data() was empty when it was begun a second time")
        return batch[0]

    def _restart(self) -> None:
        with self._seeded("epoch"):
            begun = self.position.epoch > 0 or self._in_epoch > 0
            if begun and iter(self._data) is self._data:
                self._data = self._build()  # A generator is exhausted after one epoch.
            self._iterator = iter(self._data)
        self._in_epoch = 0

    def _next(self, size: int) -> tuple[Any] | None:
        assert self._iterator is not None
        with self._seeded("batch", batch=self._in_epoch):
            if self.kind == "loader":
                found = list(islice(self._iterator, 1))
                batch = found[0] if found else None
            else:
                found = list(islice(self._iterator, size))
                batch = self._put_together(found) if found else None
        if not found:
            return None
        self._in_epoch += 1
        return (batch,)

    @contextmanager
    def _seeded(self, what: str, *, batch: int | None = None) -> Iterator[None]:
        """Seed the random generators by position in the data; restore them for the model after."""
        at = self.position.batch if batch is None else batch
        seed = _mixed(self._seed, self.position.epoch, at if what == "batch" else what)
        before = _generators()
        reseed(seed)
        try:
            yield
        finally:
            restore_random(before)


def _unchanged(batch: Any) -> Any:
    return batch


@dataclass
class _Past:
    """The sizes of an epoch's batches so far, as runs of [size, count]."""

    epoch: int = 0
    runs: list[list[int]] = field(default_factory=list)
    before: _Past | None = None  # Of the previous epoch, which may still have an open window.

    def __post_init__(self) -> None:
        if self.before is not None:
            self.before.before = None

    @property
    def samples(self) -> int:
        return sum(size * count for size, count in self.runs)

    def add(self, size: int) -> None:
        if self.runs and self.runs[-1][0] == size:
            self.runs[-1][1] += 1
        else:
            self.runs.append([size, 1])

    def sizes(self) -> Iterator[int]:
        for size, count in self.runs:
            yield from repeat(size, count)

    def of(self, position: Position) -> list[list[int]]:
        """Return the runs up to a position in this epoch or the previous one."""
        if self.before is not None and position.epoch == self.before.epoch:
            return self.before.of(position)
        runs, left = [], position.batch
        for size, count in self.runs:
            if left > 0:
                runs.append([size, min(count, left)])
            left -= count
        return runs


def reseed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _generators() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), **capture_python_random()}


def _kind_of(data: Any) -> str:
    if isinstance(data, DataLoader):
        return "loader"
    if isinstance(data, dict) or (
        isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data)
    ):
        raise RecipeError(
            f"the recipe's data() returned a {type(data).__name__} of columns; return samples: "
            "torch.utils.data.TensorDataset(x, y), a list, or a dataset"
        )
    if not isinstance(data, IterableDataset) and hasattr(data, "__getitem__"):
        if not hasattr(data, "__len__"):
            raise RecipeError(
                f"the recipe's data() returned a {type(data).__name__} that has an index but no "
                "length; give it a __len__, or make it iterable"
            )
        return "dataset"
    if hasattr(data, "__iter__"):
        return "stream"
    raise RecipeError(
        f"the recipe's data() returned a {type(data).__name__}; return a dataset (a length and an "
        "index), an iterable of samples, or a DataLoader"
    )


def _described(kind: str, length: int | None) -> str:
    return f"a {kind}" if length is None else f"a {kind} of {length:,} samples"


def _mixed(*parts: int | str) -> int:
    """Hash several values into a 63-bit seed; similar values give unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
