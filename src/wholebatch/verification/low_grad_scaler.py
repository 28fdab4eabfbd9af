"""A GradScaler that begins low, so that its first step is not one that it skips."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["gentle_loss_scale"]

GENTLE = 2.0**6


@contextmanager
def gentle_loss_scale() -> Iterator[None]:
    """Within it, every new GradScaler begins at 64 or lower instead of 65536."""
    original = torch.amp.GradScaler.__init__

    def gentle(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_enabled():
            self._init_scale = min(self._init_scale, GENTLE)

    setattr(torch.amp.GradScaler, "__init__", gentle)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.amp.GradScaler, "__init__", original)  # noqa: B010
