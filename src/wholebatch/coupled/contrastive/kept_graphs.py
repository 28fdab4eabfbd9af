"""The number of graphs that a two-pass window keeps: as asked, or as many as fit in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Keep", "Keeping"]

_log = logging.getLogger("wholebatch")

Keep: TypeAlias = int | Literal["auto"]

_MARGIN = 0.8
"""The fraction of the free memory to use; the rest allows for fragmentation."""


class Keeping:
    """The number of graphs that a window keeps from its first pass, to avoid encoding again.

    With "auto" the first window keeps none, and measures the bytes that the graph of a micro-batch
    holds. Later windows keep as many graphs as fit in `room()`: the bytes of the budget that the
    last window left free, or None if unknown.
    """

    def __init__(self, keep: Keep, models: Iterable[nn.Module]) -> None:
        self._auto = keep == "auto"
        self._models = tuple(models)
        self._number = keep if isinstance(keep, int) else 0
        self._weighed = 0  # Bytes of the graph of one micro-batch.
        self._samples = 0  # Samples of that micro-batch.
        self._gave_up = False
        self.room: Callable[[], int | None] = lambda: None

    def number(self) -> int:
        """Return the number of graphs to keep in the window that begins now."""
        room = self.room() if self._auto and self._weighed else None
        if room is not None:
            more = int(_MARGIN * room) // self._weighed
            self._number = max(0, self._number + more)
        return self._number

    def ran_out(self) -> None:
        """Stop keeping graphs, after running out of memory."""
        if self._number:
            self._gave_up = True
            _log.warning("out of memory: no graphs of the first pass are kept any more")
        self._auto, self._number = False, 0

    def relieved(self) -> bool:
        """True if graphs were given up since the last call: the window can retry as it was."""
        gave_up, self._gave_up = self._gave_up, False
        return gave_up

    @contextmanager
    def weighing(self, samples: int) -> Iterator[None]:
        """Measure the bytes that autograd saves while a micro-batch is encoded in this context."""
        if not self._auto or samples <= self._samples:
            yield
            return
        own = {
            tensor.untyped_storage()._cdata
            for model in self._models
            for tensor in (*model.parameters(), *model.buffers())
        }
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                held[storage._cdata] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self._weighed, self._samples = max(1, sum(held.values())), samples
