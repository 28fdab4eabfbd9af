"""How many micro-batches of a two-pass window keep their graphs: as asked, or as memory allows."""

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
"""The part of the room that is used: gaps between blocks of memory take their share too."""


class Keeping:
    """The number of graphs that a window keeps from its first pass, so as not to encode again.

    With "auto" the first window keeps none. What the graph of one of its micro-batches holds is
    weighed, and `room()` says how many bytes the last window left of the budget (None: not known):
    from then on a window keeps as many as fit in there.
    """

    def __init__(self, keep: Keep, models: Iterable[nn.Module]) -> None:
        self._auto = keep == "auto"
        self._models = tuple(models)
        self._number = keep if isinstance(keep, int) else 0
        self._weighed = 0  # bytes of the graph of one micro-batch
        self._samples = 0  # of the one that was weighed
        self._gave_up = False
        self.room: Callable[[], int | None] = lambda: None

    def number(self) -> int:
        """Of the window that begins now."""
        room = self.room() if self._auto and self._weighed else None
        if room is not None:
            more = int(_MARGIN * room) // self._weighed
            self._number = max(0, self._number + more)
        return self._number

    def ran_out(self) -> None:
        """Memory did not suffice: no more of it is taken for this."""
        if self._number:
            self._gave_up = True
            _log.warning("out of memory: no graphs of the first pass are kept any more")
        self._auto, self._number = False, 0

    def relieved(self) -> bool:
        """Whether graphs were given up since this was asked: the window may begin again uncut."""
        gave_up, self._gave_up = self._gave_up, False
        return gave_up

    @contextmanager
    def weighing(self, samples: int) -> Iterator[None]:
        """Around the encoding of a micro-batch of so many samples with its graph."""
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
