"""One process: nothing to reduce."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from wholebatch.distributed.sync_strategy import Sync

__all__ = ["Single"]


class Single(Sync):
    """The model is in one process, whatever its devices."""

    takes_graphs = True

    def backward(
        self, parameters: Sequence[nn.Parameter], *, reduces: bool, overlap: bool = True
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce_now(self, parameters: Sequence[nn.Parameter]) -> None:
        return

    def waited(self) -> float | None:
        return 0.0

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def largest(self, value: Tensor) -> Tensor:
        return value
