"""Passes over DataLoaders: which of them is the training data, and when its first pass ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from wholebatch.verification.divided_batch import counts_of

_MOST_WAITING = 1 << 10
_MOST_BATCHES = 1 << 40


@dataclass(eq=False)
class _Pass:
    """One iteration over a DataLoader."""

    length: float
    """The number of its batches; infinite if that is not known."""
    batches: int = 0
    noted: int = 0
    """Batches that it had given at the last backward."""
    backwards: int = 0
    """Backwards that came after a new batch of it."""
    is_exhausted: bool = False
    number: int = 0
    """Of all passes; the first is 1."""
    waiting: list[Mapping[str, float]] = field(default_factory=list)
    """What may be counted in its batches that no backward has come from."""
    is_caught_up: bool = False
    """True if all batches that it had given at the last backward have had one."""

    @property
    def is_complete(self) -> bool:
        return self.is_exhausted or self.batches >= self.length


class LoaderPasses:
    """Counts the batches that a loop takes; `begins()` is called before each pass."""

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._passes: list[_Pass] = []
        self.counts = True
        """False once what is counted in a batch is known well enough."""

    def iterate(self, original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Iterate over a DataLoader, in place of its own `__iter__`."""
        self._begins()
        try:
            length: float = len(loader)
        except TypeError:  # of an iterable data set
            length = float("inf")
        counted = _Pass(length, number=len(self._passes) + 1)
        self._passes.append(counted)
        return self._counted(original(loader, *args, **kwargs), counted)

    def _counted(self, batches: Iterator[Any], counted: _Pass) -> Iterator[Any]:
        for batch in batches:
            counted.batches += 1
            if len(counted.waiting) < _MOST_WAITING:
                counted.waiting.append(counts_of(batch) if self.counts else {})
            yield batch
        counted.is_exhausted = True

    @property
    def _now(self) -> _Pass | None:
        """Return the pass that trains now."""
        return next((a_pass for a_pass in reversed(self._passes) if a_pass.backwards), None)

    @property
    def left(self) -> float:
        """Return how many batches the pass that trains now has still to give."""
        return self._now.length - self._now.batches if self._now is not None else math.inf

    def take(self) -> tuple[int, int, Mapping[str, float]]:
        """Return the pass that a backward's batch comes from, the batch, and its counts."""
        now = self._now
        if now is None:
            return 0, 0, {}
        counted = now.waiting.pop(0) if now.waiting else {}
        now.is_caught_up = not now.waiting
        return now.number, now.number * _MOST_BATCHES + now.batches - len(now.waiting), counted

    @property
    def unused(self) -> int:
        """Return the batches at the end of a pass that no backward came from."""
        left = [len(p.waiting) for p in self._passes if p.is_complete and p.is_caught_up]
        return max(left, default=0)

    def note_backward(self) -> None:
        """Note which passes this backward's batch comes from: not from one that has evaluated."""
        new = [a_pass for a_pass in self._passes if a_pass.batches > a_pass.noted]
        for a_pass in new:
            a_pass.noted = a_pass.batches
            a_pass.backwards += not a_pass.is_exhausted or len(new) == 1 == a_pass.batches

    @property
    def training(self) -> _Pass | None:
        """Return the first of the passes that most backwards came from."""
        trained = [a_pass for a_pass in self._passes if a_pass.backwards]
        return max(trained, key=lambda a_pass: a_pass.backwards, default=None)

    @property
    def are_known(self) -> bool:
        """True if the loop takes its data from a DataLoader."""
        return self.training is not None

    @property
    def has_ended(self) -> bool:
        """True if the end of the training data has come."""
        return self.training is not None and self.training.is_complete
