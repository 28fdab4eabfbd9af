"""A micro-batch of a window, as a value: its place, its units, and the totals of its backwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wholebatch.errors import LossError
from wholebatch.losses.loss import Term, Units
from wholebatch.window.close import scalar_on

_OTHER_UNITS = (
    "two backwards of one micro-batch with different units ({first} and {again}): pass the "
    "same units to all of them (they are counted once), and more=True to all but the last. For a "
    "loss over other units, use wb.Loss.terms(...) after announce()"
)


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a window.

    >>> micro = MicroBatch(0).with_part({"loss": Term(torch.tensor(6.0), 3)})
    >>> micro = micro.with_part({"loss": Term(torch.tensor(1.0), 3)})
    >>> micro.units, micro.totals("loss")
    ({'loss': 3}, [tensor(6.), tensor(1.)])
    """

    index: int
    """Its place in the window. One without a backward has a place, too."""
    units: Mapping[str, Units] = field(default_factory=dict)
    """By term. They count once, however many backwards there are."""
    parts: tuple[Mapping[str, Any], ...] = ()
    """The totals of each backward, by term, without their graphs."""

    def with_part(self, terms: Mapping[str, Term]) -> MicroBatch:
        """Return the micro-batch with one more backward; refuse other units than before."""
        units = dict(self.units)
        for name, term in terms.items():
            known = units.get(name)
            units[name] = term.units if known is None else _same(known, term.units)
        totals = {name: term.total.detach() for name, term in terms.items()}
        return MicroBatch(self.index, units, (*self.parts, totals))

    def totals(self, name: str) -> list[Any]:
        """Return the totals of a term, one of each backward that has it."""
        return [part[name] for part in self.parts if name in part]

    @staticmethod
    def without_weight(terms: Mapping[str, Term]) -> MicroBatch:
        """Return one that only takes part in the collectives of the other ranks."""
        nothing = dict.fromkeys(terms, 0)
        return MicroBatch(-1, nothing, (dict.fromkeys(terms, 0.0),))


def _same(first: Units, again: Units) -> Units:
    """Return the units of a micro-batch whose further backward has these; refuse other units.

    On a device nothing can be read now: NaN stands for other units until the close reads it.
    """
    if not (isinstance(first, Tensor) or isinstance(again, Tensor)):
        if first != again:
            raise LossError(_OTHER_UNITS.format(first=first, again=again))
        return first
    device = (first if isinstance(first, Tensor) else again).device  # type: ignore[union-attr]
    one, other = (scalar_on(device, units, torch.float64) for units in (first, again))
    return torch.where(one == other, one, math.nan)


def refuse_units(counts: Sequence[float], micro_batches: Sequence[MicroBatch] = ()) -> None:
    """Refuse units that are negative or not finite, now that those on a device were read.

    `micro_batches` are those that returned them; without, `units=` has counted them before.
    """
    for place, count in enumerate(counts):
        if 0 <= count < math.inf:
            continue
        must = "must be finite and not negative"
        if not micro_batches:
            raise LossError(f"units= counted {count:g}: {must}")
        if math.isnan(count) and len(micro_batches[place].parts) > 1:
            raise LossError(_OTHER_UNITS.format(first="one number", again="another"))
        raise LossError(
            f"units={count:g} of the window's micro-batch {place + 1}: {must}, what the loss is a "
            "sum over (samples, tokens, weights)"
        )
