"""Windows of wholebatch itself (Accumulator, WholeBatch, adapters), read from their own ledger."""

from __future__ import annotations

from typing import Any

import torch

from wholebatch.verification.evidence import Ledger


class LedgerWindow:
    """One window of wholebatch while it is open."""

    def __init__(self, window: Any) -> None:
        self._window = window
        self.backwards = 0
        self.is_changed = self.carries = False

    @property
    def is_open(self) -> bool:
        return self._window.open is not None

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches that it has now."""
        return len(self._window.all_micro_batches) if self.is_open else 0

    @property
    def parameters(self) -> set[int]:
        return {id(parameter) for parameter in self._window.current.inputs}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self._window.target.optimizers)

    def ledger(self) -> Ledger:
        """Return the ledger of a window that is complete."""
        micro_batches = self._window.all_micro_batches
        names = {name: None for micro in micro_batches for name in micro.units}
        columns = [[float(m.units[n]) for m in micro_batches if n in m.units] for n in names]
        return Ledger(
            units=tuple(max(columns, key=sum, default=[])),
            are_units_given=self._window.are_units_given,
            carries=self.carries,
            is_changed=self.is_changed,
        )
