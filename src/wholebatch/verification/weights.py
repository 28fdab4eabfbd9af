"""The weight of every micro-batch in the step, from the evidence of a window.

Every loop adds `weight × mean over its units` of each micro-batch, however it is written: a mean
divided by the steps, a sum divided by the units of the window, a mean times its share. Right is
`weight = units / units of the window`, for every term of a loss. The units come from the loss's
graph, from the case of `verify_loop`, or from the ledger of wholebatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from wholebatch.readable_sizes import percent
from wholebatch.verification.distances import TIMES_THE_FLOOR, apart, fit_of, parallel
from wholebatch.verification.evidence import Counts, WindowEvidence
from wholebatch.verification.loss_factors import Reading, Unreadable, read_terms

SAME_WEIGHT = 1e-3
"""Weights of losses that differ by less are the same."""


@dataclass(frozen=True)
class Unknown:
    """The weights cannot be known; `is_different` if the update is certainly another one."""

    reason: str
    is_different: bool = False


@dataclass(frozen=True)
class Weights:
    """The weights of a window: for each term of the loss the ways to read it, the likeliest first.

    `off` is how far they are from the right ones.
    """

    terms: tuple[tuple[Reading, ...], ...]
    sizes: tuple[int, ...]
    """The micro-batches of each rank."""
    off: float
    source: str = "weights"

    @property
    def is_right(self) -> bool:
        return self.off <= SAME_WEIGHT

    @property
    def units(self) -> tuple[float, ...]:
        return self.best(self.terms[0]).units

    @property
    def own(self) -> tuple[float, ...]:
        """Return the weight that each term of the loss has of its own."""
        return tuple(self.best(readings).own for readings in self.terms)

    def rows(self, units: Sequence[float]) -> list[list[float]]:
        """Return numbers of all micro-batches by rank."""
        places = iter(units)
        return [[next(places) for _ in range(size)] for size in self.sizes]

    def best(self, readings: Sequence[Reading]) -> Reading:
        """Return the way to read a term in which it is right, else the likeliest."""
        is_right = (way for way in readings if way.off <= SAME_WEIGHT)
        return next(is_right, readings[0])


Part = Sequence[Sequence[int]]
"""The places of some backwards of a window, by rank: those of one loss."""


def weights_of(
    ranks: Sequence[WindowEvidence],
    counts: Counts,
    own: Sequence[float] = (),
    part: Part | None = None,
) -> Weights | Unknown:
    """Return the weight of each micro-batch in the step, or the reason why it is not known.

    `ranks` are the evidence of one window, one of each rank. `own` are the weights that the terms
    of the loss have of their own, where another window has told them. `part` are the backwards of
    one loss, where a window has several.
    """
    if ranks[0].ledger is not None:
        return _of_the_ledger(ranks)
    known = factors_of(ranks)
    if isinstance(known, Unknown):
        return known
    part = part or [range(len(window.backwards)) for window in ranks]
    factors_left = iter(known)
    factors = []
    for window, places in zip(ranks, part, strict=True):
        row = [next(factors_left) for _ in window.backwards]
        factors += [row[place] for place in places]
    places_of = [(window, i) for window, row in zip(ranks, part, strict=True) for i in row]
    micro_batches = [window.backwards[i].terms for window, i in places_of]
    known_units = [window.units[i] for window, i in places_of if window.units]
    try:
        terms = read_terms(micro_batches, counts, factors, known_units)
    except Unreadable as unread:
        return Unknown(
            f"the weight of the loss cannot be read: {unread}. Use wb.verify, which runs the "
            "undivided batch, or give the units to wb.Accumulator"
        )
    if len(own) == len(terms):
        terms = [[way.with_own(o) for way in ways] for ways, o in zip(terms, own, strict=True)]
    off = max(min(reading.off for reading in readings) for readings in terms)
    sizes = tuple(map(len, part))
    return Weights(tuple(map(tuple, terms)), sizes, off)


# ------------------------------------------------------------------- from the ledger of wholebatch


def _of_the_ledger(ranks: Sequence[WindowEvidence]) -> Weights:
    """Return the weights of a window of wholebatch: its ledger has the units, and one factor."""
    ledgers = [window.ledger for window in ranks if window.ledger is not None]
    units = tuple(chain(*(ledger.units for ledger in ledgers)))
    total = sum(units) or 1.0
    reading = Reading(tuple(unit / total for unit in units), units)
    are_given = any(ledger.are_units_given for ledger in ledgers)
    sizes = tuple(len(ledger.units) for ledger in ledgers)
    source = "ledger, with units as given" if are_given else "ledger"
    return Weights(((reading,),), sizes, 0.0, source)


# ------------------------------------------------------------------- on the way to the step


def factors_of(ranks: Sequence[WindowEvidence]) -> Sequence[float] | Unknown:
    """Return the factor that each backward's gradient has in the step."""
    window, count = ranks[0], len(ranks)
    brought = [micro.contribution for rank in ranks for micro in rank.backwards]
    if any(rank.gradient is None for rank in ranks):
        return (1 / count,) * len(brought)
    gradient, flow = before_clip(window), torch.stack(brought).sum(0)
    if not is_lost(ranks):
        return (float(gradient @ flow / (flow @ flow)),) * len(brought)
    tolerance = _tolerance(ranks, brought, flow)
    factors, left = fit_of(brought, gradient)
    if left <= max(1e-4, tolerance) and len(brought) <= 64:
        return factors
    off = apart(gradient, flow)
    if count == 1 and apart(window.backwards[-1].after, flow) <= tolerance:
        return Unknown(
            f"the loop itself changes the gradient by {percent(off)} after the last backward: use "
            "wb.verify"
        )
    return Unknown("the gradient of the step is not the sum of what the backwards added", True)


def is_lost(ranks: Sequence[WindowEvidence]) -> bool:
    """True if the gradient of the step is not what all backwards brought, with one factor."""
    if any(window.gradient is None or not window.backwards for window in ranks):
        return False
    brought = [micro.contribution for window in ranks for micro in window.backwards]
    flow = torch.stack(brought).sum(0)
    return not parallel(before_clip(ranks[0]), flow, _tolerance(ranks, brought, flow))


def _tolerance(ranks: Sequence[WindowEvidence], brought: Sequence[Tensor], total: Tensor) -> float:
    """Return the distance that rounding explains: more, where gradients nearly cancel."""
    eps = max(window.eps for window in ranks)
    if ranks[0].is_half:
        return ranks[0].eps
    spread = sum(float(part.norm()) for part in brought) / max(float(total.norm()), 1e-300)
    return min(TIMES_THE_FLOOR * eps * max(spread, 1.0), math.sqrt(eps))


def before_clip(window: WindowEvidence) -> Tensor:
    """Return the gradient of the step, before it was clipped for it."""
    assert window.gradient is not None
    clips = window.last_clips
    if clips and parallel(window.gradient, clips[-1].after, 1e-4):
        return clips[0].before
    return window.gradient
