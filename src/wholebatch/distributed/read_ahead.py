"""Read the items of a window before its first forward, for engines that must know their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from wholebatch.distributed.process_group import Group
from wholebatch.errors import RankError


class Ahead(NamedTuple):
    """An item of a window."""

    item: Any
    counts: bool
    """False if the item only takes part in the collectives of the other ranks."""
    last: bool
    """True if it is the window's last."""


def read_ahead(
    items: Iterator[Any], size: Callable[[], int], group: Group
) -> Iterator[list[Ahead]]:
    """Yield the items of one window after the other, equally many on every rank of the group.

    Collectives run inside the forwards, or the reduction inside the last backward. So a rank with
    fewer items than another gets its last item again, which does not count. Nothing is read beyond
    the window. It ends when no rank has an item.

    >>> for window in read_ahead(iter("abc"), lambda: 2, Group()):
    ...     print([(item, last) for item, _, last in window])
    [('a', False), ('b', True)]
    [('c', True)]

    Args:
        items: This rank's items.
        size: Returns the number of items of the next window, or of the rest of one that is open.
        group: The ranks, which meet before each window.
    """
    window: list[Any] = []
    while True:
        latest, window = window[-1:], list(islice(items, size()))
        most, fewest = group.most_and_fewest(len(window))
        if most == 0:
            return
        if not latest and fewest == 0:
            raise RankError(
                "a rank has no micro-batch for the first window, and a sharded model needs every "
                "rank in every forward: give every rank at least one"
            )
        repeated = (window or latest)[-1:] * (most - len(window))
        yield [
            Ahead(item, counts=place < len(window), last=place == most - 1)
            for place, item in enumerate(window + repeated)
        ]
        window = window or latest
