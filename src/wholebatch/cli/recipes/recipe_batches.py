"""Whole batches from a recipe's data, in an order that does not depend on earlier batches.

The order of a dataset in epoch e is a permutation made from (seed, e), and random numbers that its
samples draw are seeded by (seed, epoch, batch, rank). So a batch is always the same, whatever ran
before it: resuming goes straight there. A DataLoader is read again from its start.

With several ranks, each takes its share of every batch. Of a dataset a rank reads only its own
samples; a DataLoader is read by every rank, which takes its slice.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from wholebatch.batch.lookahead_loader import generators_of
from wholebatch.batch.samples import flatten, layout_of
from wholebatch.cli.batch_scaling import share_of
from wholebatch.errors import RecipeError, StateError


@dataclass(frozen=True)
class Position:
    """The position of a batch: number `batch` of epoch `epoch`, both from 0."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class EmptyShare:
    """The share of a rank in a batch with fewer samples than ranks; `like` has one sample."""

    like: Any


class Batches:
    """The batches of a recipe, one per `take()`, over any number of epochs.

    `build` makes the data: a dataset (a length and an index), or a DataLoader, whose batches are
    used as they are. The last batch of an epoch may be short; it is
    never dropped. With `ranks`, `take()` returns the share of `rank`, or an `EmptyShare`.

    Batch number n of the run, from 0, has `times(n)` times `batch_size` samples.
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
        times: Callable[[int], int] = lambda number: 1,
        name: str = "data",
    ) -> None:
        self.position = Position()
        self.taken = 0
        """The batches that were taken, over all epochs."""
        self.batch_size, self._times = batch_size, times
        self._seed, self._name = seed, name
        self._rank, self._ranks = rank, ranks
        self._collate = collate or default_collate
        with seeded(seed, name):
            self._data = build()
        self.kind = _kind_of(self._data)
        self.length = len(self._data) if self.kind == "dataset" else None
        if self.length == 0:
            raise RecipeError(f"the recipe's {name}() is empty")
        self._stream: Iterator[Any] | None = None  # of this epoch
        self._in_stream = 0  # batches taken from it
        self._peeked: tuple[Any] | None = None
        self._order: tuple[int, list[int]] | None = None  # of an epoch's samples

    @property
    def loader_batch_size(self) -> int | None:
        """The batch size of a DataLoader; None for other data."""
        return self._data.batch_size if self.kind == "loader" else None

    @property
    def in_an_epoch(self) -> int | None:
        """The number of batches of an epoch, as large as the next one; None if it is not known."""
        size = self._size_of(self.taken)
        return None if self.length is None else -(-self.length // size)

    @cached_property
    def fingerprint(self) -> str | None:
        """A checksum of a dataset's length and of three of its samples.

        None for a stream, and for samples that cannot be read or are others each time.
        """
        if self.length is None:
            return None
        try:
            first, again = self._digest(self.length), self._digest(self.length)
        except Exception:  # a sample that is broken: training says so if it comes to it
            return None
        return first if first == again else None

    def _digest(self, length: int) -> str:
        digest = hashlib.sha256(str(length).encode())
        for place in sorted({0, length // 2, length - 1}):
            with seeded(self._seed, "fingerprint", place):
                leaves, _ = flatten(self._data[place])
            for leaf in leaves:
                value = leaf.value
                if isinstance(value, Tensor):
                    plain = value.detach().cpu().contiguous().flatten()
                    digest.update(f"{value.dtype}{[*value.shape]}".encode())
                    digest.update(plain.view(torch.uint8).numpy().tobytes())
                elif hasattr(value, "tobytes"):  # an array, an image
                    digest.update(value.tobytes())
                elif isinstance(value, bool | int | float | str | bytes):
                    digest.update(repr(value).encode())
        return digest.hexdigest()

    def peek(self) -> Any:
        """Return the batch that the next `take` returns, and read no further.

        At the end of an epoch this begins the next one: `position` is then that of its first batch.
        """
        if self._peeked is None:
            batch = self._from_dataset() if self.kind == "dataset" else self._from_stream()
            self._peeked = (batch,)
        return self._peeked[0]

    def take(self) -> Any:
        """Return the batch at `position`, and move on to the next."""
        batch = self.peek()
        self._peeked = None
        self.position = Position(self.position.epoch, self.position.batch + 1)
        self.taken += 1
        return batch

    def _size_of(self, number: int) -> int:
        """Return the samples of batch `number` of the run, over all ranks."""
        return self.batch_size * self._times(number)

    def _samples_before(self, place: int) -> int:
        """Return the samples in the first `place` batches of this epoch."""
        first = self.taken - self.position.batch
        return sum(self._size_of(first + before) for before in range(place))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with the kind and length that identify the data."""
        position = {"epoch": self.position.epoch, "batch": self.position.batch}
        return {"kind": self.kind, "length": self.length, **position, "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        if (state["kind"], state["length"]) != (self.kind, self.length):
            raise StateError(
                f"the data has changed: the run was on {_described(state['kind'], state['length'])}"
                f", and data() now gives {_described(self.kind, self.length)}"
            )
        self.position, self.taken = Position(state["epoch"], state["batch"]), state["taken"]
        self._stream = self._peeked = None

    # ---------------------------------------------------------------- datasets

    def _from_dataset(self) -> Any:
        """Return this rank's share of the batch at the position."""
        assert self.length is not None
        first = self._samples_before(self.position.batch)
        if first >= self.length:
            self.position, first = Position(self.position.epoch + 1, 0), 0
        epoch, batch = self.position.epoch, self.position.batch
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(_mixed(self._seed, epoch))
            order = torch.randperm(self.length, generator=generator).tolist()
            self._order = epoch, order
        chosen = self._order[1][first : first + self._size_of(self.taken)]
        mine = chosen[share_of(len(chosen), rank=self._rank, ranks=self._ranks)]
        with seeded(self._seed, epoch, batch, self._rank):
            share = _collated(self._collate, self._read(mine or chosen[:1]))
        return share if mine else EmptyShare(share)

    def _read(self, indices: list[int]) -> list[Any]:
        if callable(getattr(self._data, "__getitems__", None)):  # torch's method for many samples
            return list(self._data.__getitems__(indices))
        return [self._data[index] for index in indices]

    # ----------------------------------------------------------------- streams

    def _from_stream(self) -> Any:
        if self._stream is None:
            self._begin_epoch()
        while self._in_stream < self.position.batch:  # resumed: read up to the position
            if self._next() is None:
                raise StateError(
                    f"the data has changed: epoch {self.position.epoch} ended after "
                    f"{self._in_stream} batches, but the run had used {self.position.batch}"
                )
        batch = self._next()
        if batch is None and self.position.batch:
            self.position = Position(self.position.epoch + 1, 0)
            self._begin_epoch()
            batch = self._next()
        if batch is None:
            raise RecipeError(
                f"the recipe's {self._name}() is empty in epoch {self.position.epoch}"
            )
        if self._ranks == 1:
            return batch[0]
        layout = layout_of(batch[0])
        mine = share_of(layout.size, rank=self._rank, ranks=self._ranks)
        if mine.start == mine.stop:
            return EmptyShare(layout.take(slice(0, 1)))
        return layout.take(mine)

    def _begin_epoch(self) -> None:
        with seeded(self._seed, self._name, self.position.epoch):
            for generator in generators_of(self._data):  # that continue from epoch to epoch
                generator.manual_seed(_mixed(self._seed, self._name, self.position.epoch))
            self._stream = iter(self._data)
        self._in_stream = 0

    def _next(self) -> tuple[Any] | None:
        """Return the stream's next batch, or None at its end."""
        assert self._stream is not None
        with seeded(self._seed, self._name, self.position.epoch, self._in_stream):
            read = (*islice(self._stream, 1),)
        self._in_stream += len(read)
        return read or None


@contextmanager
def seeded(*key: object) -> Iterator[None]:
    """Seed the generators of torch's CPU, Python and NumPy by `key`; put them back afterwards."""
    numpy = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    seed = _mixed(*key)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy is not None and before[2] is not None:
            numpy.random.set_state(before[2])


def seed_generators(seed: int) -> None:
    """Seed the generators of torch (on all devices), Python and, if imported, NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _collated(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Collate samples into a batch; torch's own collate takes only samples of one shape."""
    if collate is not default_collate:
        return collate(samples)
    try:
        return default_collate(samples)
    except Exception as error:
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        raise RecipeError(
            f"the samples of data() cannot be put together as they are ({reason}): give the "
            "recipe a function collate(samples) that makes a batch of them, or make them alike"
        ) from error


def _mixed(*key: object) -> int:
    """Return a number of 63 bits made from the key."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _kind_of(data: Any) -> str:
    if isinstance(data, DataLoader):
        return "loader"
    columns = isinstance(data, tuple) and data and all(isinstance(it, Tensor) for it in data)
    if isinstance(data, dict) or columns:
        raise RecipeError(
            f"the recipe's data() returned a {type(data).__name__} of columns; return samples: "
            "torch.utils.data.TensorDataset(x, y), a list, or a dataset"
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return "dataset"
    raise RecipeError(
        f"the recipe's data() returned a {type(data).__name__}; return a dataset (a length and an "
        "index), or a DataLoader, of a stream too"
    )


def _described(kind: str, length: int | None) -> str:
    return f"a {kind}" if length is None else f"a {kind} of {length:,} samples"
