"""Passes over DataLoaders: which of them is the training data, and when its first pass ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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

    @property
    def is_complete(self) -> bool:
        return self.is_exhausted or self.batches >= self.length


class _Batches:
    """The iterator of a DataLoader, with its batches counted."""

    def __init__(self, iterator: Any, counted: _Pass) -> None:
        self._iterator, self._pass = iterator, counted

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._pass.is_exhausted = True
            raise
        self._pass.batches += 1
        return batch

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class LoaderPasses:
    """Counts the batches that a loop takes; `begins()` is called before each pass."""

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._passes: list[_Pass] = []

    def iterate(self, original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Iterate over a DataLoader, in place of its own `__iter__`."""
        self._begins()
        try:
            length: float = len(loader)
        except TypeError:  # of an iterable data set
            length = float("inf")
        self._passes.append(_Pass(length))
        return _Batches(original(loader, *args, **kwargs), self._passes[-1])

    def note_backward(self) -> None:
        """Note which passes this backward's batch comes from: not from one that has evaluated."""
        new = [one for one in self._passes if one.batches > one.noted]
        for one in new:
            one.noted = one.batches
            one.backwards += not one.is_exhausted or len(new) == 1 == one.batches

    @property
    def training(self) -> _Pass | None:
        """Return the first of the passes that most backwards came from."""
        trained = [one for one in self._passes if one.backwards]
        return max(trained, key=lambda one: one.backwards, default=None)

    @property
    def are_known(self) -> bool:
        """True if the loop takes its data from a DataLoader."""
        return self.training is not None

    @property
    def has_ended(self) -> bool:
        """True if the end of the training data has come."""
        return self.training is not None and self.training.is_complete
