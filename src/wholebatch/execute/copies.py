"""Micro-batches travel to the device on a stream of their own.

The host is ahead of the device: while a micro-batch computes, the next one's step has already been
asked for. A copy on the computing stream would wait its turn behind that work; on a second stream
it runs beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wholebatch.splitting import to_device
from wholebatch.splitting.structure import flatten

__all__ = ["Copies"]


class Copies:
    """Moves micro-batches to one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, micro: Any) -> Any:
        """The micro-batch on the device, ready for whatever the current stream does next."""
        if self._device.type != "cuda":
            return to_device(micro, self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = to_device(micro, self._device)
        if moved is micro:
            return micro
        current.wait_stream(self._stream)
        for leaf in flatten(moved)[0]:
            if isinstance(leaf.value, Tensor) and leaf.value.is_cuda:
                leaf.value.record_stream(current)
        return moved
