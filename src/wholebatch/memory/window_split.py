"""How a batch is cut: by the size that was given, or by what was found to fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from wholebatch.batch import Batches, Tokens, batch_size_of, joined, split_numbered
from wholebatch.batch.samples import flatten, layout_of, readable_layout
from wholebatch.errors import UnsupportedError

_FOUND = ("fits", "fitting_bytes", "size")


@dataclass(eq=False)
class WindowSplit:
    """The micro-batches of a window, and the sizes that were chosen or learned.

    No micro-batch has as many bytes as one that failed: batches of shorter sequences keep their
    size. With `given=None` each batch is one micro-batch, unless it does not fit.
    """

    given: int | Tokens | str | None
    layout: dict[str, Any]
    fits: int | None = None
    """Samples that "auto" has chosen; or tokens of a micro-batch, once those given failed."""
    fitting_bytes: float | None = None
    """Bytes that a micro-batch may have, once a larger one has failed."""
    size: int | None = None
    """Samples of a micro-batch of the last window, where they were chosen or learned."""
    numbers: list[Sequence[int]] = field(default_factory=list)
    """Of each micro-batch of the last window, the places of its samples."""
    _ends: list[int] = field(default_factory=list)  # of each batch, the samples up to its end

    def micro_batches(
        self, batches: Sequence[Any], choose: Callable[[Sequence[Any]], int]
    ) -> list[Any]:
        """Return the micro-batches of these batches; `choose` is asked once, for "auto".

        A number of samples splits each batch by itself; "auto" and tokens join them first, if that
        is possible.
        """
        by = self.given
        whole = None
        if len(batches) > 1 and (by == "auto" or isinstance(by, Tokens)):
            whole = joined(batches, **self.layout)
        pieces = batches if whole is None else (whole,)
        if by == "auto" and self.fits is None:
            self.fits = choose(pieces)
        micros: list[Any] = []
        self.numbers, self._ends = [], []
        for piece in pieces:
            start = self._ends[-1] if self._ends else 0
            parts = self._parts(piece)
            self._ends.append(start + sum(len(numbers) for _, numbers in parts))
            micros += [micro for micro, _ in parts]
            self.numbers += [[start + n for n in numbers] for _, numbers in parts]
        if whole is not None:
            self._ends = list(accumulate(batch_size_of(it, **self.layout) for it in batches))
        return micros

    def undivided(self, batches: Sequence[Any]) -> Any:
        """Return the batch, or several as one, for a model that must see all of it at once."""
        whole = batches[0] if len(batches) == 1 else joined(batches, **self.layout)
        if whole is None:
            raise UnsupportedError(
                f"a window of {len(batches)} batches that cannot be joined into one (they differ "
                "in more than their number of samples), and a BatchNorm trains with the "
                "statistics of all of them: pad them to one length, or use "
                'batchnorm="freeze" or GroupNorm layers'
            )
        self._ends = list(accumulate(map(self.samples_of, batches)))
        self.numbers = [range(self._ends[-1])]
        return whole

    def _parts(self, batch: Any) -> list[tuple[Any, Sequence[int]]]:
        """Return the micro-batches of one batch, with the places of their samples in it."""
        size = self._size_for(batch)
        if isinstance(size, int):
            return layout_of(batch, **self.layout).parts(size)
        if size is not None:
            return split_numbered(batch, size, **self.layout)
        return [(batch, range(self.samples_of(batch)))]

    def samples_of(self, batch: Any) -> int:
        """Return the samples of a batch; 1 if it cannot be read."""
        layout = readable_layout(batch, **self.layout)
        return 1 if layout is None else layout.size

    def _size_for(self, batch: Any) -> int | Tokens | None:
        """Return what was given or chosen, or as much of it as was found to fit."""
        asked = self.given
        if isinstance(asked, Tokens):
            return asked if self.fits is None else replace(asked, budget=self.fits)
        size = self.fits if isinstance(asked, str) else asked
        if self.fitting_bytes is not None:
            samples = self.samples_of(batch)
            share = self.fitting_bytes / _bytes_of(batch, samples)
            most = max(1, int(samples * share + 1e-6))
            size = most if size is None else min(size, most)
        if size != asked:
            self.size = size
        return size

    def smaller(
        self, micros: Sequence[Any], share: float, again: Callable[[], list[Any]]
    ) -> list[Any]:
        """Return smaller micro-batches than these; `again()` splits the batch anew."""
        before = self.numbers
        largest = max(_bytes_of(*pair) for pair in zip(micros, map(len, before), strict=True))
        made: list[Any] = []
        while self.numbers == before:  # a budget that is a little smaller may change nothing
            if isinstance(self.given, Tokens):
                self.fits = max(1, int((self.fits or self.given.budget) * share))
            else:
                largest = self.fitting_bytes = largest * share
            made = again()
        return made

    @property
    def samples(self) -> int:
        """Samples in the batch that was split last."""
        return sum(map(len, self.numbers))

    @property
    def largest(self) -> int:
        """Samples of the largest micro-batch of the last window."""
        return max(map(len, self.numbers))

    def largest_of(self, batches: Batches) -> Any:
        """Return the batch with the most samples of those that were split last."""
        sizes = [end - start for start, end in pairwise([0, *self._ends])]
        return batches[sizes.index(max(sizes))]

    def batch_of_each(self) -> list[int]:
        """Return the place of each micro-batch's batch among those that were split last."""
        firsts = ([*numbers, 0][0] for numbers in self.numbers)  # a filled row has none
        return [bisect_right(self._ends, first) for first in firsts]

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that were found to fit, and what they were found for."""
        return {"given": str(self.given), **{name: getattr(self, name) for name in _FOUND}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with those sizes, unless another `micro_batch` is given now."""
        if saved["given"] == str(self.given):
            for name in _FOUND:
                setattr(self, name, saved[name])


def _bytes_of(batch: Any, samples: int) -> float:
    """Return the bytes of a batch's tensors; its number of samples if it has none."""
    leaves, _ = flatten(batch)
    tensors = (leaf.value for leaf in leaves if isinstance(leaf.value, Tensor))
    return float(sum(tensor.nbytes for tensor in tensors) or samples)
