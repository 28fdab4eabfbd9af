"""Engines that must know a window's items before its first forward get equally many of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from wholebatch.distributed.process_group import Group
from wholebatch.distributed.read_ahead import read_ahead
from wholebatch.errors import RankError


class Others(Group):
    """A group with another rank, which brings these numbers of items to its windows."""

    def __init__(self, *items: int) -> None:
        super().__init__()
        self._items = list(items)

    def most_and_fewest(self, number: int) -> tuple[int, int]:
        other = self._items.pop(0) if self._items else 0
        return max(number, other), min(number, other)


def windows(text: str, size: int, group: Group) -> list[Any]:
    texts = []
    for window in read_ahead(iter(text), lambda: size, group):
        assert [last for _, _, last in window] == [False] * (len(window) - 1) + [True]
        texts.append("".join(item if counts else item.upper() for item, counts, _ in window))
    return texts


@pytest.mark.parametrize(
    ("text", "others", "want"),
    [
        ("abcde", (), ["ab", "cd", "e"]),
        ("", (), []),
        ("abc", (2, 2), ["ab", "cC"]),
        ("abc", (2, 2, 1), ["ab", "cC", "C"]),
        ("a", (2, 2, 2), ["aA", "AA", "AA"]),
        ("abcd", (1,), ["ab", "cd"]),
    ],
)
def test_the_items_of_each_window(text: str, others: tuple[int, ...], want: list[str]) -> None:
    """A capital letter is an item that does not count."""
    group = Others(*others) if others else Group()
    assert windows(text, 2, group) == want


def test_nothing_is_read_beyond_a_window() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for item in range(5):
            read.append(item)
            yield item

    sizes = iter([2, 3, 1])
    ahead = read_ahead(items(), lambda: next(sizes), Group())
    assert (len(next(ahead)), read) == (2, [0, 1])
    assert (len(next(ahead)), read) == (3, [0, 1, 2, 3, 4])
    assert not list(ahead)


@pytest.mark.parametrize(("text", "other"), [("", 2), ("ab", 0)])
def test_every_rank_needs_an_item_for_the_first_window(text: str, other: int) -> None:
    with pytest.raises(RankError, match="give every rank at least one"):
        windows(text, 2, Others(other))
