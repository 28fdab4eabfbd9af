"""One process: nothing to reduce."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from wholebatch.sync.strategy import Sync

__all__ = ["Single"]


class Single(Sync):
    """The model is in one process, whatever its devices."""

    def next_backward_reduces(self, reduces: bool) -> None:
        return

    def restore(self) -> None:
        return

    def reduce_now(self, parameters: Sequence[nn.Parameter]) -> None:
        return

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def largest(self, value: Tensor) -> Tensor:
        return value
