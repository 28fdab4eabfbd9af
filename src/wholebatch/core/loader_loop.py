"""The loop over a loader: which micro-batch is the last of its window, and who else takes part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from wholebatch.core import random_state
from wholebatch.core.lookahead_loader import Feed
from wholebatch.errors import OptionError, RankError, WindowError

if TYPE_CHECKING:
    from wholebatch.core.accumulator import Accumulator

__all__ = ["over"]

_driven: WeakSet[nn.Module] = WeakSet()  # models in a loop right now: nesting two is refused


def over(
    loader: Iterable[Any], *accumulators: Accumulator, continue_window: bool = False
) -> Iterator[Any]:
    """Drive several accumulators (a GAN's two) over one loader; each has windows of its own."""
    if not accumulators:
        raise OptionError("wb.over(loader): give at least one Accumulator")
    for accumulator in accumulators:
        if any(model in _driven for model in accumulator._window.target.models):
            raise WindowError(
                "over() inside over() on the same model: both would feed its gradients; use one "
                "loop, or wb.over(loader, first, second) for several accumulators"
            )
        accumulator._may_start(continue_window)
    models = [m for accumulator in accumulators for m in accumulator._window.target.models]
    if len({id(model) for model in models}) != len(models):
        raise OptionError(
            "two accumulators over the same model in one wb.over: give one Accumulator a list of "
            "optimizers instead"
        )
    return _drive(loader, accumulators)


def _drive(loader: Iterable[Any], accumulators: Sequence[Accumulator]) -> Iterator[Any]:
    feed = _feed_for(loader, accumulators)
    for accumulator in accumulators:
        accumulator._driver = accumulator._feed = feed
        _driven.update(accumulator._window.target.models)
    try:
        if any(accumulator._window.sync.counts_must_agree for accumulator in accumulators):
            yield from _agreed_places(feed, accumulators)
        else:
            yield from _own_places(feed, accumulators)
        for accumulator in accumulators:
            accumulator.epoch += 1
    finally:
        for accumulator in accumulators:
            accumulator._driver = None
            accumulator._stand_in(False)
            accumulator._window.sync.restore()
            for model in accumulator._window.target.models:
                _driven.discard(model)


def _own_places(feed: Feed, accumulators: Sequence[Accumulator]) -> Iterator[Any]:
    """Each rank at its own pace: all meet where windows close, also those without data left."""
    shared = any(accumulator._window.sync.ranks > 1 for accumulator in accumulators)
    if shared:
        for accumulator in accumulators:
            window = accumulator._window
            window.ranks_with_more = int(window.sync.sum([float(feed.has_next())])[0])
    while feed.take():
        for accumulator in accumulators:
            if accumulator._places == 0:
                accumulator._open_place()
            full = accumulator._places + 1 >= accumulator._size
            accumulator._enter_place(
                is_last=full or not feed.has_next(), has_more=shared and full and feed.has_next()
            )
        yield feed.current
        for accumulator in accumulators:
            accumulator._leave_place()
    order = list(feed.closed) or list(accumulators)  # as the bodies of the other ranks close them
    while shared and any(accumulator._window.ranks_with_more for accumulator in accumulators):
        for accumulator in order:
            accumulator._join()


def _agreed_places(feed: Feed, accumulators: Sequence[Accumulator]) -> Iterator[Any]:
    """Every rank runs equally many forwards: the window's items are held until all agree.

    A rank with fewer runs its last item again, with weight zero and its buffers put back.
    """
    if len(accumulators) > 1:
        raise OptionError(
            "wb.over with several accumulators on a sharded model: their forwards would have to "
            "agree with each other too; give one Accumulator a list of optimizers (DeepSpeed's "
            "engines: a loop for each)"
        )
    [accumulator] = accumulators
    window = accumulator._window
    device = window.target.device
    stand_in: Any = None
    has_stand_in = False
    while True:
        accumulator._open_place()
        items: list[Any] = []
        while len(items) < accumulator._size and feed.take():
            items.append(feed.current)
        count = int(window.sync.largest(torch.tensor(float(len(items)), device=device)))
        if count == 0:
            return
        if items:
            stand_in, has_stand_in = items[-1], True
        elif not has_stand_in:
            raise RankError(
                f"rank {window.sync.rank} has no data at all, and a sharded model needs every rank "
                "in every forward: give it at least one micro-batch"
            )
        for index in range(count):
            accumulator._enter_place(is_last=index == count - 1)
            accumulator._stand_in(index >= len(items))
            yield stand_in if window.weightless else items[index]
            accumulator._leave_place()
            accumulator._stand_in(False)


def _feed_for(loader: Iterable[Any], accumulators: Sequence[Accumulator]) -> Feed:
    saved = next((a._resume for a in accumulators if a._resume is not None), None)
    for accumulator in accumulators:
        accumulator._resume = None
    if saved is not None:
        random_state.restore(saved["random"])  # whatever was drawn since it was loaded
        return Feed(loader, saved["feed"])
    before = accumulators[0]._feed
    # An iterator goes on where the last loop left it; the item looked ahead at is still there.
    if before is not None and before.loader is loader and iter(loader) is loader:
        return before
    return Feed(loader)
