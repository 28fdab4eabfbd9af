"""The evidence of one window: what a recorder wrote down, as plain values that decide nothing.

Gradients are rows of numbers: those of the parameters that the window's optimizer steps on. Of a
large model every n-th number is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from wholebatch.verification.loss_terms import LossTerm

NO_LIMIT = 1e6
"""Clipping to more than this is a way to measure a norm."""


@dataclass(frozen=True, eq=False)
class Backward:
    """One backward of the loop, with the gradients before and after it."""

    before: Tensor
    after: Tensor
    contribution: Tensor
    """The gradient that this backward brought."""
    number: int = 0
    """Of all backwards that were seen."""
    terms: tuple[LossTerm, ...] = ()
    loss_scale: float = 1.0
    rates: tuple[float, ...] = ()
    """Learning rates and weight decays of the optimizer; empty if it was not known yet."""
    moved: bool = False
    """True if the weights have changed since the backward before, by more than rounding."""
    operations: frozenset[str] = frozenset()
    """The operations of its loss."""
    touched: frozenset[int] = frozenset()
    """The parameters that it brought a gradient."""
    batchnorms: tuple[str, ...] = ()
    is_averaged: bool = False
    """True if an average of the weights has moved since the backward before."""
    loader_pass: int = 0
    """The pass over a DataLoader that its batch comes from; 0 if none was seen."""
    batch: int = 0
    """The number of that batch, of all passes."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """What a loop may count in its batch: samples, tokens, labels."""
    carried: tuple[int, ...] = ()
    """Numbers of earlier backwards, whose outputs are inputs of this one."""
    doubts: tuple[str, ...] = ()
    """What may make another update than the weights tell, by the names in `judge._DOUBTS`."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """The lines of the loss and of the backward, as file:line."""

    @property
    def targets(self) -> tuple[float | None, ...]:
        """Return the one number that the targets of each term are: a GAN's 1 and 0."""
        return tuple(term.target for term in self.terms)

    @property
    def signs(self) -> tuple[bool, ...]:
        return tuple(term.weight < 0 for term in self.terms)


@dataclass(frozen=True, eq=False)
class Clip:
    """One call that clips: after which backward, its limit, and the gradient before and after."""

    number: int
    limit: float
    before: Tensor
    after: Tensor

    @property
    def cuts(self) -> bool:
        """True if the gradient was changed."""
        return not torch.equal(self.before, self.after)

    @property
    def counts(self) -> bool:
        """True if it is more than a measurement of the norm."""
        return self.limit < NO_LIMIT or self.cuts


@dataclass(frozen=True)
class Ledger:
    """A window of wholebatch: its own count of units, and what was seen beside it."""

    units: tuple[float, ...]
    are_units_given: bool
    """True if the loop gave these units, and no test of the loss function has seen them."""
    carries: bool = False
    """True if the output of a micro-batch is an input of a later one."""
    is_changed: bool = False
    """True if what the models hold has changed between its micro-batches."""


@dataclass(frozen=True, eq=False)
class WindowEvidence:
    """The backwards between two steps of one optimizer, and the gradient of the step."""

    number: int = 0
    optimizer: int = 0
    eps: float = 2.0**-24
    is_half: bool = False
    """True if the gradients are kept in 16 bits."""
    backwards: tuple[Backward, ...] = ()
    clips: tuple[Clip, ...] = ()
    gradient: Tensor | None = None
    """The gradient of the step; None if it was not seen."""
    indices: tuple[int, ...] = ()
    """The parameters that the optimizer steps on."""
    line: str = ""
    """The line of the step, as file:line."""
    is_brief: bool = False
    """True if no gradients were recorded: windows like it are known."""
    ledger: Ledger | None = None
    units: tuple[float, ...] = ()
    """The units of the micro-batches, where they are given."""

    @property
    def cleared(self) -> list[int]:
        """Return the places of the backwards before which gradients were cleared, but the first."""
        rows = enumerate(pairwise(self.backwards), start=1)
        return [i for i, (was, now) in rows if was.after.any() and not now.before.any()]

    @property
    def last_clips(self) -> list[Clip]:
        """Return the clips after the last backward: before them, all gradients are in."""
        count = len(self.backwards)
        return [clip for clip in self.clips if clip.number == count and clip.counts]


@dataclass(frozen=True)
class Counts:
    """The numbers of micro-batches that a loop may divide by, and the ranks."""

    micro_batches: int
    """Of this window, on one rank."""
    usual: int
    """Of most windows."""
    first: int = 0
    """Of the first window."""
    ranks: int = 1
    number: int = 0
    """The number of this window; the first is 1."""
    divisor: int = 0
    """A whole number that the loss is divided by, which none of the others is."""

    @property
    def nominals(self) -> list[int]:
        """Return the counts that a loop may take for this window's own."""
        others = [n for n in (self.usual, self.first) if n > 1 and n != self.micro_batches]
        return list(dict.fromkeys(others or [self.divisor or self.micro_batches]))
