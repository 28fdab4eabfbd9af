"""The items of a loader, one at a time, from a position where a run was saved.

Nothing is read before its turn, unless `has_next`, `look_ahead` or `read` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from wholebatch.batch.samples import Static, layout_of
from wholebatch.errors import StateError, UnsupportedError
from wholebatch.window.forward_state import capture_random, restore_random


@dataclass(frozen=True)
class Unpadded:
    """A loader without this rank's repeated samples; made by `unpadded`."""

    loader: DataLoader[Any]
    kept: int
    """The number of this rank's samples that are not repeats: always its first ones."""
    drawn: int
    """The number of samples that the sampler gives this rank, repeats included."""
    batch_size: int
    static: Static = ()
    start: int = 0

    @property
    def sampler(self) -> Any:
        """Return the DistributedSampler, so that `loader.sampler.set_epoch(epoch)` still works."""
        return getattr(self.loader.batch_sampler, "sampler", None)

    def __len__(self) -> int:
        return min(len(self.loader), -(-self.kept // self.batch_size))

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.loader, self.start):
            start = index * self.batch_size
            size = min(self.batch_size, self.drawn - start)
            kept = min(size, self.kept - start)
            if kept == size:
                yield batch
            elif kept > 0:
                layout = layout_of(batch, batch_size=size, static=self.static)
                yield layout.take(slice(kept))


def unpadded(loader: Iterable[Any], *, static: Static = (), start: int = 0) -> Iterable[Any]:
    """Return `loader` with each sample of the dataset on exactly one rank.

    `DistributedSampler(drop_last=False)` repeats the first samples until every rank has the same
    number. Counted twice, they would bias the update. Here they are dropped, so ranks may differ by
    one sample (and by one batch, if a batch held only a repeat). Loaders that repeat nothing are
    returned unchanged.

    Args:
        loader: A DataLoader; anything else is returned unchanged.
        static: Leaves that are passed on whole, as for `split`.
        start: Batches already taken, for a loader that resumes in mid-epoch by itself.
    """
    if not isinstance(loader, DataLoader):
        return loader
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return loader
    size = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.total_size == size:
        return loader
    if type(sampler).__iter__ is not DistributedSampler.__iter__:
        raise UnsupportedError(
            f"{type(sampler).__name__} repeats samples to make the ranks equal, and does not say "
            "which: use drop_last=True, or DistributedSampler itself"
        )
    if batches is None or type(batches) is not BatchSampler:
        how = "with batch_size=None" if batches is None else f"with {type(batches).__name__}"
        raise UnsupportedError(
            f"a DataLoader {how} does not say which samples are in a batch, so those that the "
            "DistributedSampler repeats cannot be dropped: give DataLoader(batch_size=..., "
            "sampler=...), or DistributedSampler(drop_last=True)"
        )
    # Rank r has the indices r, r + R, r + 2R, ... of the padded order; those below `size` are real.
    kept = len(range(sampler.rank, size, sampler.num_replicas))
    return Unpadded(loader, kept, sampler.num_samples, batches.batch_size, static, start)


NOTHING: Any = object()
"""Marks a missing item."""


class Feed:
    """Items of a loader, one at a time, with `peek`, and a state to resume from.

    The state is: how many items were fetched, and the generators as they were before the loader was
    started (a shuffling sampler draws its seed there). A loader with `state_dict` and
    `load_state_dict` keeps its own position.
    """

    def __init__(
        self, loader: Iterable[Any], resume: dict[str, Any] | None = None, *, static: Static = ()
    ) -> None:
        self.loader = loader
        self._static = static
        self.fetched = 0
        self.current: Any = NOTHING
        self.is_exhausted = False
        self._held: list[Any] = []
        self._read = 0  # of those, by `read`
        self._error: BaseException | None = None
        if resume is None:
            self._start_random = capture_random()
            self._start_generators = [g.get_state() for g in generators_of(loader)]
            self._iterator: Iterator[Any] = iter(unpadded(loader, static=static))
        else:
            self._start_random = resume["random"] or capture_random()  # None: a new pass
            self._start_generators = resume["generators"]
            self._resume(resume)

    def _resume(self, state: dict[str, Any]) -> None:
        self.fetched = state["fetched"]
        if state["loader"] is not None:
            if not _keeps_position(self.loader):
                raise StateError(
                    "the saved loader kept its own position (state_dict), this one does not: "
                    "pass a loader of the same kind"
                )
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            self._iterator = iter(unpadded(self.loader, static=self._static, start=self.fetched))
            return
        now, is_new_pass = capture_random(), state["random"] is None
        restore_random(self._start_random)
        generators = generators_of(self.loader)
        if len(generators) != len(self._start_generators):
            raise StateError(
                f"the saved loader had {len(self._start_generators)} random generators of its "
                f"own, this one has {len(generators)}: build the loader as before"
            )
        for generator, saved in zip(generators, self._start_generators, strict=True):
            now_seed = generator.initial_seed()
            generator.set_state(saved)
            if is_new_pass and generator.initial_seed() != now_seed:
                generator.manual_seed(now_seed)  # the loop seeds it anew for every pass
        self._iterator = iter(unpadded(self.loader, static=self._static))
        for position in range(self.fetched):
            if next(self._iterator, NOTHING) is NOTHING:
                raise StateError(
                    f"the loader ended after {position} micro-batches, but the saved run had read "
                    f"{self.fetched}: pass the same data, from its start"
                )
        if not is_new_pass:
            restore_random(now)

    def take(self) -> bool:
        """Make the next item `current`; return False if there is none."""
        if not (self._held or self.look_ahead(1)):
            self.current = NOTHING
            self.is_exhausted = True
            return False
        if not self._held and self._error is not None:
            error, self._error = self._error, None
            raise error
        self.current = self._held.pop(0)
        return True

    def has_next(self) -> bool:
        """Return True if another item follows the current one, by reading it."""
        return bool(self._held) or self.look_ahead(1) > 0

    def look_ahead(self, most: int) -> int:
        """Return how many items follow the current one, up to `most`, and keep them."""
        while len(self._held) < most and self._error is None:
            try:
                item = next(self._iterator, NOTHING)
            except Exception as error:  # items before it are still good: raise when its turn comes
                self._error = error
                break
            if item is NOTHING:
                break
            self.fetched += 1
            self._held.append(item)
        return min(most, len(self._held) + (self._error is not None))

    @property
    def holds_items(self) -> bool:
        """True if items are read that were not taken."""
        return bool(self._held)

    @property
    def has_ended(self) -> bool:
        """True if all items were taken."""
        return self.is_exhausted and not self._held

    def read(self) -> Iterator[Any]:
        """Yield the items before their turn; `give_out` takes each when it is used."""
        while self.look_ahead(self._read + 1) > self._read:
            if self._error is not None and self._read == len(self._held):
                raise self._error
            self._read += 1
            yield self._held[self._read - 1]
        self.is_exhausted = True

    def give_out(self) -> None:
        """Take the first item that was read."""
        self.current = self._held.pop(0)
        self._read -= 1

    def state_at_end(self) -> dict[str, Any] | None:
        """Return what the next pass begins with: generators of the loader's own, if it has any."""
        states = [generator.get_state() for generator in generators_of(self.loader)]
        begin = {"fetched": 0, "random": None, "generators": states, "loader": None}
        return begin if states else None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the items that were taken."""
        if self._held and _keeps_position(self.loader):
            raise StateError(
                "state_dict() where the next micro-batch is read already, from a loader that keeps "
                "its own position: it would be lost. Save where the last backward of a full window "
                "has returned a Step"
            )
        return {
            "fetched": self.fetched - len(self._held),
            "random": self._start_random,
            "generators": self._start_generators,
            "loader": self.loader.state_dict()  # type: ignore[attr-defined]
            if _keeps_position(self.loader)
            else None,
        }


def _keeps_position(loader: object) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def generators_of(loader: object) -> list[torch.Generator]:
    """Return the random generators that a DataLoader and its samplers were given."""
    batches = getattr(loader, "batch_sampler", None)
    owners = [loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    by_id = {id(it): it for it in (getattr(owner, "generator", None) for owner in owners)}
    return [it for it in by_id.values() if isinstance(it, torch.Generator)]
