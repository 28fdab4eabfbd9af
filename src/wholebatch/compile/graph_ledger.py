"""The seeds that a graph takes from the window, and the sums that it records there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wholebatch.compile.trace import Form

if TYPE_CHECKING:
    from wholebatch.core.window import Window

__all__ = ["Ledger"]


class Ledger:
    """Provides the seeds of micro-steps and records their sums, all on the device."""

    def __init__(self, window: Window, device: torch.device) -> None:
        self._window = window
        self._device = device
        self._likes: dict[torch.dtype, Tensor] = {}

    def seeds(self, form: Form) -> list[Tensor]:
        """Return the seed for the backward of each total."""
        return [
            self._window.seed_of(name, self._like(dtype), weight)
            for name, dtype, weight in zip(form.names, form.dtypes, form.weights, strict=True)
        ]

    def record(self, form: Form, totals: list[Tensor], units: list[Tensor]) -> None:
        """Record a micro-step whose gradients have been added."""
        counted = iter(units)
        self._window.record(
            dict(zip(form.names, totals, strict=True)),
            {
                name: next(counted) if number is None else number
                for name, number in zip(form.names, form.units, strict=True)
            },
            dict(zip(form.names, form.weights, strict=True)),
        )

    def _like(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._likes:
            self._likes[dtype] = torch.zeros((), dtype=dtype, device=self._device)
        return self._likes[dtype]
