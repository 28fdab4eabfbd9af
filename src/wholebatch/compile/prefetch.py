"""Copies of micro-batches to the device on a separate stream.

The host runs ahead of the device: while one micro-batch is computed, the step of the next one is
already queued. A copy on the compute stream would wait behind that work. On a second stream it
overlaps with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wholebatch.core.splitting import to_device
from wholebatch.core.splitting.samples import flatten

__all__ = ["Copies"]


class Copies:
    """Copies micro-batches to one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, micro: Any) -> Any:
        """Return the micro-batch on the device, ready for later work on the current stream."""
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
