"""What a forward changes besides gradients: buffers and random generators."""

from __future__ import annotations

import torch
from torch import nn

from wholebatch import randomness

__all__ = ["Snapshot"]


class Snapshot:
    """Copies of a model's buffers, with the random generators as they were at that moment.

    A window that is begun again (out of memory, a replay) must find both as the first try did:
    a forward has moved BatchNorm's running statistics and advanced the generators.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._random = randomness.capture(every=False)

    @torch.no_grad()
    def restore(self) -> None:
        """Put both back."""
        for buffer, copy in self._buffers:
            buffer.copy_(copy)
        randomness.restore(self._random)
