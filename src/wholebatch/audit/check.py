"""What a check sees, and what it may answer.

One law is one file in this package: a subclass of `Check` that overrides those of the four methods
that it needs, and stands in the list `LAWS` of `loop_checks.py`. The core asks the list at four
places and does not know what is in it. Its update is the same if the list is empty.

A docstring has four paragraphs after its title: what the check finds, what it costs, if its answer
is certain or likely, and what it cannot see. docs/laws.md shows them as a table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias

from torch import Tensor, nn

from wholebatch.audit.finding import AuditFinding
from wholebatch.coupled.last_reduction import Reduction, last_reductions, without_units
from wholebatch.errors import WholebatchError
from wholebatch.losses.loss import Units, check_units


@dataclass(frozen=True)
class Refused:
    """The window cannot go on: an error of this class, with the cause and what to do."""

    error: type[WholebatchError]
    because: str


@dataclass(frozen=True)
class Warned:
    """The window goes on, and this is probably a mistake. Each check warns once."""

    because: str


Answer: TypeAlias = Refused | Warned | AuditFinding | None
"""A finding is refused too, in one message with the others of the same micro-batch."""


@dataclass(frozen=True)
class MicroBatch:
    """One loss of a micro-batch, before its backward."""

    loss: Tensor
    units: Units
    is_mean: bool
    """True if the loss is a mean over its units, False if it is their sum."""
    steps: Collection[int]
    """The numbers that a loop may divide by as its accumulation steps; empty if not known."""
    outputs: Sequence[Tensor]
    """What the models returned, with a row for each sample."""
    models: Sequence[nn.Module]
    first_calls: Sequence[AuditFinding | Warned]
    """What a repetition of the models' first calls showed."""
    foreign_norms: Sequence[nn.Module] = ()
    """BatchNorms in training mode that ran, and are in no model of an accumulator."""
    keeps_parameters: bool = True
    """False if an engine gathers the parameters for each forward."""

    @cached_property
    def reductions(self) -> list[Reduction]:
        """The last reductions of the loss, read from its graph; of a mean without its units."""
        terms = last_reductions(self.loss)
        return (without_units(terms, self.number) or terms) if self.is_mean else terms

    @cached_property
    def number(self) -> float:
        """The units, read from their device."""
        return float(check_units(self.units))


class Check:
    """One law. By default it has nothing to say."""

    windows: ClassVar[Literal["the first", "1, 2, 4, 8, …"]] = "the first"
    """The windows in which it is asked."""

    def window_begins(self) -> Answer:
        """Answer when a window begins."""
        return None

    def micro_batch(self, micro: MicroBatch) -> Answer | Iterable[Answer]:
        """Answer to a loss of a micro-batch, before its backward."""
        return None

    def addition(self) -> Answer:
        """Answer when all gradients of a micro-batch have been added."""
        return None

    def close(self, micro_batches: int) -> Answer:
        """Answer when the window is about to make its update."""
        return None


def silenced(begin: str) -> str:
    """Return how to silence a warning that begins like this."""
    return f'warnings.filterwarnings("ignore", "{begin}") silences this warning'
