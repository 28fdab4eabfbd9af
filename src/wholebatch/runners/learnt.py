"""What windows show of how micro-batches use their memory, for those that follow."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field

__all__ = ["Learnt", "Place"]

Place = tuple[int, int]
"""Which storage of a micro-batch: the stretch that it was made in, and its number there."""


@dataclass(eq=False)
class Learnt:
    """What windows so far have shown: who touches what when, and what one micro-batch takes."""

    touched: dict[int, frozenset[Place]] = field(default_factory=dict)
    most: int = 0
    """The most bytes of pages, on the device or away, that one micro-batch had."""
    busy: int = 0
    """The most bytes that were in use, on their way in, or on their way out, at once."""
    largest: int = 0
    """The bytes of the largest page."""
    _uses: dict[Place, list[int]] = field(default_factory=dict)

    def learn(self, stretch: int, touched: frozenset[Place]) -> None:
        """These places were touched in this stretch, and no others."""
        before = self.touched.get(stretch, frozenset())
        for place in before - touched:
            self._uses[place].remove(stretch)
        for place in touched - before:
            insort(self._uses.setdefault(place, []), stretch)
        self.touched[stretch] = touched

    def next_use(self, place: Place, stretch: int) -> int:
        """The first stretch after this one that touches the place; a far one if none is known."""
        uses = self._uses.get(place, ())
        index = bisect_right(uses, stretch)
        return uses[index] if index < len(uses) else 1 << 30
