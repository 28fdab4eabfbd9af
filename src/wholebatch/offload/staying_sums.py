"""Sums that stay on the device once they are complete, in memory that activations have left.

As the last backward of a window goes on, it gives back more memory than its gradients take. A sum
that is complete there need not leave for the host and come back for the step, as long as the
device's peak does not rise by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Staying"]

_LEAST = 2**20
"""Smaller sums travel: to ask for room costs more."""


class Staying:
    """The sums of one window that are on their device, by the parameter."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}
        self._aside = 0
        self._full = False

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing stays yet; what a backward may still need beside what it holds is kept free."""
        self.sums.clear()
        self._full = False
        self._aside = 2 * max((p.numel() * max(4, p.element_size()) for p in parameters), default=0)

    def room_for(self, parameter: nn.Parameter, total: Tensor) -> Tensor | None:
        """New memory of the device for this sum, below the highest peak so far; None: no room."""
        if self._full or total.nbytes < _LEAST:
            return None
        found = torch.cuda.memory_stats(parameter.device)
        needed = found.get("allocated_bytes.all.current", 0) + total.nbytes + self._aside
        if needed > found.get("allocated_bytes.all.peak", 0):  # some allocators do not say
            return None
        try:
            room = torch.empty(total.shape, dtype=total.dtype, device=parameter.device)
        except torch.OutOfMemoryError:  # there is enough, in pieces
            self._full = True
            return None
        self.sums[id(parameter)] = room
        return room
