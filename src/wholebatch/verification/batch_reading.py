"""How the batch of a proof is read: its samples counted, taken and put in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wholebatch.core.splitting import batch_size_of, drop_samples, split
from wholebatch.core.splitting.samples import layout_of

__all__ = ["Reading"]


@dataclass(frozen=True)
class Reading:
    """What `WholeBatch(batch_size=, static=)` say, kept with the batch that they are said of."""

    batch_size: int | Callable[[Any], int] | None = None
    static: str | Sequence[str] = ()

    def size(self, batch: Any) -> int:
        """The number of samples."""
        return batch_size_of(batch, batch_size=self.batch_size, static=self.static)

    def split(self, batch: Any, micro_batch: Any) -> list[Any]:
        """The micro-batches."""
        return split(batch, micro_batch, batch_size=self.batch_size, static=self.static)

    def first(self, batch: Any, keep: int) -> tuple[Any, Reading]:
        """The first samples, and how to read them."""
        part = drop_samples(batch, keep, batch_size=self.batch_size, static=self.static)
        said = keep if isinstance(self.batch_size, int) else self.batch_size
        return part, Reading(said, self.static)

    def permuted(self, batch: Any, order: Sequence[int]) -> Any:
        """The batch with its samples in another order."""
        return layout_of(batch, batch_size=self.batch_size, static=self.static).take(list(order))
