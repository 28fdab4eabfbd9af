"""Windows of wholebatch itself (Accumulator, WholeBatch, adapters), read from their own ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wholebatch.audit.scalar_graph import Part, parts_of
from wholebatch.verification.evidence import Ledger

Rates = tuple[float, ...]


def rates_of(optimizer: torch.optim.Optimizer) -> Rates:
    """Return the learning rates and the weight decays of an optimizer."""
    groups, names = optimizer.param_groups, ("lr", "weight_decay")
    return tuple(float(group.get(name) or 0.0) for name in names for group in groups)


class LedgerWindow:
    """One window of wholebatch while it is open."""

    def __init__(self, window: Any) -> None:
        self._window = window
        self._rates: dict[int, Rates] = {}
        self._parts: list[list[Part]] = []
        self._changed, self._carries = "", False
        if window.current.known is None:  # else it may be announced long before its first backward
            self._note_rates()

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

    def note_backward(self, totals: Any, changed: Callable[[bool], str], *, carries: bool) -> None:
        """Note the totals of a backward; `changed(is_first)` tells what has since the last."""
        if not self._rates:
            self._note_rates()
        listed = [totals] if isinstance(totals, torch.Tensor) else list(totals)
        self._changed = self._changed or changed(not self._parts)
        self._carries |= carries
        self._parts.append(parts_of(listed[0]) if len(listed) == 1 else [])

    def _note_rates(self) -> None:
        self._rates = {id(optimizer): rates_of(optimizer) for optimizer in self.optimizers}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self._window.target.optimizers)

    def ledger(self, optimizer: torch.optim.Optimizer) -> Ledger:
        """Return the ledger of a window that is complete."""
        micro_batches = self._window.all_micro_batches
        names = {name: None for micro in micro_batches for name in micro.units}
        columns = [[float(m.units[n]) for m in micro_batches if n in m.units] for n in names]
        before = self._rates.get(id(optimizer))
        units = max(columns, key=sum, default=[])
        are_seen = len(columns) == 1 and len(units) == len(self._parts)
        totals = zip(self._parts, units, strict=are_seen)
        return Ledger(
            units=tuple(units),
            are_units_given=self._window.are_units_given,
            has_means=are_seen and all(are_means(*total) for total in totals),
            schedule_moved=before is not None and before != rates_of(optimizer),
            carries=self._carries,
            changed=self._changed,
        )


def are_means(parts: list[Part], units: float) -> bool:
    """True if all parts of a total are means over its units; as many as units are one of each."""
    return 0 < len(parts) < units and all(_is_mean(part, units) for part in parts)


def _is_mean(part: Part, units: float) -> bool:
    if part.kind == "mean":  # a factor may make a sum of it again
        return part.over > 1 and max(part.factors, default=1.0) <= 1.0
    # Of [units, units] losses, the division may be by the features; by 2, it may be of two parts.
    return units > 2 and part.over != units * units and part.is_divided_by(units)
