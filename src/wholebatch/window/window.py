"""The values of one update: the window, its micro-batches, and the report of it.

Every micro-batch's backward starts from a *seed*, the same number for the whole window and for all
ranks, and adds `seed × d(total)` into the gradients. It is a power of two near `1 / units`, so that
multiplying by it does not round: of all units, if they were counted before (`known`), else of the
window before or of the first micro-batch. The close knows the units and corrects with one factor. A
loss of several terms has a seed for each, `weight / units` of the term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.errors import LossError
from wholebatch.losses.loss import SINGLE, Term, Units
from wholebatch.window.close import scalar_on


@dataclass(frozen=True, repr=False)
class Step:
    """The report of one update: its exact mean loss, its units and its gradient norm.

    Attributes:
        update: The number of updates so far, this one included.
        loss: The mean over all units of the window and of all ranks.
        units: These units.
        grad_norm: The norm of the normalised gradient, after `on_gradient=` and before clipping.
        micro_batches: The micro-batches of this rank.
        seconds: The time of the window on the host's clock.
        clip: The factor by which clipping multiplied the gradient.
        loss_scale: The GradScaler's scale in this window; 1 without one.
        terms: The mean of each term of a `wb.Loss.terms`, by name.
        skipped: The reason when no update was made, else None.
    """

    update: int
    loss: float
    units: float
    grad_norm: float
    micro_batches: int
    seconds: float
    clip: float = 1.0
    loss_scale: float = 1.0
    terms: Mapping[str, float] = field(default_factory=dict)
    skipped: str | None = None

    def __repr__(self) -> str:
        text = f"loss={self.loss:.6g}, units={self.units:g}, grad_norm={self.grad_norm:.4g}"
        text += f", micro_batches={self.micro_batches}, seconds={self.seconds:.3g}"
        text += f", skipped={self.skipped!r}" if self.skipped else ""
        return f"Step(update={self.update}, {text})"


@dataclass(frozen=True, eq=False)
class Window:
    """One update while its micro-batches are added: fixed when it begins."""

    groups: list[list[nn.Parameter]]
    """The parameters that are trained, by parameter group."""
    known: Mapping[str, float] | None
    """All units by term, if they were counted over the window and all ranks before."""
    seed: float | Tensor
    averaged_by: float = 1.0
    """The engine divides the reduced gradient by this."""
    scaling: float = 1.0
    """The loss scale in every backward."""
    loss_scale: float = 1.0
    """The part of it that the close undoes; a library may undo it by itself."""
    started: float = field(default_factory=perf_counter)
    inputs: list[nn.Parameter] = field(init=False)
    """The parameters, without their groups."""
    has_terms: bool = field(init=False)
    """True if each term is divided by its own units, which were counted before."""

    def __post_init__(self) -> None:
        inputs = [parameter for group in self.groups for parameter in group]
        object.__setattr__(self, "inputs", inputs)
        has_terms = self.known is not None and self.known.keys() != {SINGLE}
        object.__setattr__(self, "has_terms", has_terms)

    def seed_of(self, name: str, weight: float) -> float | Tensor:
        """Return the number that the backward of a term's total starts from."""
        seed = self.seed * weight
        if self.known is not None and self.has_terms:
            units = self.known[name]
            seed = seed / units if units else 0.0
        return seed * (self.averaged_by * self.scaling)


def is_tested_window(number: int) -> bool:
    """Return True for windows 1, 2, 4, 8, ...; the first window of a run has number 1.

    The loss must add up and graphs must compute what eager code does in every window. A mistake may
    show only in later data (padding, a rare class) or after the weights have moved. Testing at
    powers of two costs ten tests in 1,000 windows.

    >>> [number for number in range(1, 20) if is_tested_window(number)]
    [1, 2, 4, 8, 16]
    """
    return number > 0 and number & (number - 1) == 0


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
