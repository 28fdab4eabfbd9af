"""The precision of a micro-batch's forward: the parameters' own dtype, or autocast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from wholebatch.errors import OptionError

__all__ = ["Autocast", "Full", "Precision", "choose"]


class Precision(ABC):
    """One number format for the forward passes of a window."""

    name: str

    @abstractmethod
    def forward(self) -> AbstractContextManager[object]:
        """Return the context for a micro-batch's forward (and only for that)."""

    def copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in this dtype, outside the autograd graph."""
        return weight.detach().to(dtype)

    def let_go(self) -> None:
        """Drop cached casts; they are made again when needed."""
        return

    @abstractmethod
    def begin(self) -> None:
        """Open a window: casts of weights may be kept from here until `end`."""

    @abstractmethod
    def end(self) -> None:
        """End the window: the weights are about to change."""


class Full(Precision):
    """No autocast: the parameters' own dtype."""

    name = "full"

    def forward(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self) -> None:
        return

    def end(self) -> None:
        return


class Autocast(Precision):
    """torch.autocast, with every weight cast once per window instead of once per micro-batch.

    Autocast caches its casts of leaf parameters until its outermost context is left. Counting the
    window as one more level of nesting extends that to the window's end. The weights do not change
    in between, so the casts hold the same numbers, and their backward is the same cast.

    With `keeps=False` casts are kept for one forward only. An engine that frees weights between
    micro-batches would leave their casts behind. And FSDP2 reduces a block's gradients when the
    block's backward is over, while the backward of a cast made by an earlier micro-batch comes
    later.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, *, keeps: bool = True) -> None:
        self.name = "bf16" if dtype is torch.bfloat16 else "fp16"
        self._device_type = device_type
        self._dtype = dtype
        self._keeps = keeps
        self._holding = False
        self._copies: dict[tuple[int, torch.dtype], tuple[int, Tensor]] = {}

    def forward(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device_type, dtype=self._dtype)

    def copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._holding or weight.dtype is dtype:
            return super().copy_of(weight, dtype)
        version, copy = self._copies.get((id(weight), dtype), (-1, weight))
        if version != weight._version:  # Not cast yet, or the weight has changed since.
            copy = super().copy_of(weight, dtype)
            self._copies[id(weight), dtype] = weight._version, copy
        return copy

    def begin(self) -> None:
        if self._keeps and not self._holding:
            torch.autocast_increment_nesting()
            self._holding = True

    def let_go(self) -> None:
        self._copies.clear()
        torch.clear_autocast_cache()

    def end(self) -> None:
        self._copies.clear()
        if self._holding:
            self._holding = False
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def choose(precision: str, device_type: str, *, keeps: bool = True) -> Precision:
    """Return the precision with this name, or raise an OptionError that lists the names.

    `keeps`: weights may be cast once per window, instead of once per micro-batch.
    """
    if precision in ("full", "fp32"):
        return Full()
    if precision == "bf16":
        return Autocast(device_type, torch.bfloat16, keeps=keeps)
    if precision == "fp16":
        return Autocast(device_type, torch.float16, keeps=keeps)
    raise OptionError(
        f"precision={precision!r}: must be 'full' (the parameters' own dtype; 'fp32' is the same), "
        "'bf16' or 'fp16' (autocast)"
    )
