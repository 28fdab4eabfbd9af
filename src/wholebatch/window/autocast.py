"""The number format of the forward: the parameters' own, or autocast with weights cast once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Precision(ABC):
    """One number format for the forward passes of a window."""

    name: str

    @abstractmethod
    def forward(self) -> AbstractContextManager[object]:
        """Return the context for a micro-batch's forward (and only for that)."""

    def let_go(self) -> None:
        """Drop cached casts, those of an autocast around the loop too; they are made again."""
        torch.clear_autocast_cache()

    def window(self) -> AbstractContextManager[object]:
        """Return the context of a window's micro-batches: casts of weights are kept within it."""
        return nullcontext()


class Full(Precision):
    """No autocast: the parameters' own dtype."""

    name = "full"
    forward = nullcontext
    window = nullcontext


class Autocast(Precision):
    """torch.autocast, with every weight cast once per window instead of once per micro-batch.

    Autocast caches its casts of leaf parameters until its outermost context is left. Counting the
    window as one more level of nesting extends that to the window's end. The weights do not change
    in between, so the casts hold the same numbers, and their backward is the same cast.

    With `keeps=False` casts are not kept. An engine that frees weights between blocks or
    micro-batches would leave their casts behind. And FSDP2 reduces a block's gradients when the
    block's backward is over, while the backward of a cast made by an earlier micro-batch comes
    later.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, *, keeps: bool = True) -> None:
        self.name = "bf16" if dtype is torch.bfloat16 else "fp16"
        self._device_type = device_type
        self._dtype = dtype
        self._keeps = keeps

    def forward(self) -> AbstractContextManager[object]:
        # Without a cache, a checkpointed block's casts are freed with the block's whole weights.
        # None leaves it as it is: a trace switches it off.
        cache = None if self._keeps else False
        return torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=cache)

    @contextmanager
    def window(self) -> Iterator[None]:
        if not self._keeps:
            yield
            return
        torch.autocast_increment_nesting()
        try:
            yield
        finally:  # the weights are about to change
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


class OwnAutocast(Autocast):
    """The autocast that the model's forward enters by itself, as Accelerate makes it."""

    forward = nullcontext
