"""Memory use of micro-batches, learnt from earlier windows."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field

__all__ = ["Learnt", "Place"]

Place = tuple[int, int]
"""The identity of a storage: the stretch in which it was created, and its index there."""


@dataclass(eq=False)
class Learnt:
    """The pages that each stretch touches, and the memory that one micro-batch needs.

    A stretch is the part of a micro-batch's run between two meetings.
    """

    touched: dict[int, frozenset[Place]] = field(default_factory=dict)
    most: int = 0
    """The peak of one micro-batch's bytes of pages, on the device or on the host."""
    busy: int = 0
    """The peak of bytes in use or being copied, in either direction."""
    largest: int = 0
    """The bytes of the largest page."""
    _uses: dict[Place, list[int]] = field(default_factory=dict)

    def learn(self, stretch: int, touched: frozenset[Place]) -> None:
        """Record that this stretch touched exactly these places."""
        before = self.touched.get(stretch, frozenset())
        for place in before - touched:
            self._uses[place].remove(stretch)
        for place in touched - before:
            insort(self._uses.setdefault(place, []), stretch)
        self.touched[stretch] = touched

    def next_use(self, place: Place, stretch: int) -> int:
        """Return the first later stretch that touches the place, or `1 << 30` if none is known."""
        uses = self._uses.get(place, ())
        index = bisect_right(uses, stretch)
        return uses[index] if index < len(uses) else 1 << 30
