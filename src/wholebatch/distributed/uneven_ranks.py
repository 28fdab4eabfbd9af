"""Ranks with different numbers of batches: one without takes part in the updates of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from wholebatch.core.window import Step
from wholebatch.errors import RankError

if TYPE_CHECKING:
    from wholebatch.core.whole_batch import WholeBatch
    from wholebatch.core.window import Window

__all__ = ["batches_of", "join"]

NOTHING = object()


def batches_of(train: WholeBatch, loader: Iterable[Any], *, ahead: bool = False) -> Iterator[Any]:
    """The loader's batches, and then windows of the other ranks until all have run out."""
    window = train._window
    if window.sync.ranks == 1:
        yield from _read_ahead(window, loader) if ahead else loader
        return
    iterator = iter(loader)
    batch = next(iterator, NOTHING)
    window.ranks_with_more = int(window.sync.sum([float(batch is not NOTHING)])[0])
    last = batch
    while batch is not NOTHING:
        following = next(iterator, NOTHING)
        window.has_more = following is not NOTHING
        _all_have_data(train)
        yield batch
        last, batch = batch, following
    while window.ranks_with_more:
        _all_have_data(train)
        train.join(last)


def _read_ahead(window: Window, loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches, each read while the device makes the update of the one before."""
    iterator = iter(loader)
    read: list[tuple[Any, BaseException | None]] = []

    def read_one() -> None:
        if not read:
            try:
                read.append((next(iterator, NOTHING), None))
            except Exception as problem:  # belongs to the batch that will be asked for
                read.append((NOTHING, problem))

    window.while_waiting = read_one
    try:
        while True:
            read_one()
            batch, problem = read.pop()
            if problem is not None:
                raise problem
            if batch is NOTHING:
                return
            yield batch
    finally:
        window.while_waiting = None


def join(train: WholeBatch, like: Any) -> Step:
    """One step of the other ranks, with nothing to add; `like` is a batch that is not counted."""
    window = train._window
    window.has_more = False
    why = _needs_every_rank(train)
    if why is not None:
        raise RankError(
            f"rank {window.sync.rank} has no sample of this batch, and {why}: make the batch larger"
        )
    train._runner.join_look()
    if train._count is not None and like is not NOTHING:
        train._count.learn(like)
    known = None if train._count is None else train._count([])
    train._runner.begin_window()
    if not window.sync.counts_must_agree:
        return window.join(known)
    if like is NOTHING:
        raise RankError(
            f"rank {window.sync.rank} has no data at all, and a sharded model needs every rank "
            "in every forward: give it at least one batch"
        )
    stand_in = train._fitting.split(like)[0]
    window.begin(0, known=known)
    try:
        with train._precision.window():
            train._runner.run((), stand_in=stand_in)
        return window.close()
    finally:
        window.sync.restore()


def _needs_every_rank(train: WholeBatch) -> str | None:
    """Why no rank may be without data; None where one may."""
    if train._window.leaves_gradients:
        return "after gradient() the step is made by each rank's own loop"
    why: str | None = train._runner.needs_every_rank()
    return why


def _all_have_data(train: WholeBatch) -> None:
    window = train._window
    if window.ranks_with_more == window.sync.ranks:
        return
    why = _needs_every_rank(train)
    if why is not None:
        raise RankError(
            f"only {window.ranks_with_more} of {window.sync.ranks} ranks have data left, "
            f"and {why}: give every rank equally many batches"
        )
