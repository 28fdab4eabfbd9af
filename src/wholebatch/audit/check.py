"""What a check of an own loop sees, and what it may say.

One check is one file: a subclass of `Check` that overrides the moments that it needs, with its name
in `CHECKS` of `own_loop.py`. A check raises what is certain and yields a warning of what is likely.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from wholebatch.audit.scalar_graph import Part, parts_of, without_units
from wholebatch.losses.loss import Units, check_units
from wholebatch.window.observer import Plan


@dataclass(frozen=True)
class LossOfMicroBatch:
    """One loss of a micro-batch, before its backward."""

    loss: Tensor
    units: Units
    is_mean: bool
    """True if the loss was given as a mean over its units, False if as their sum."""
    plan: Plan

    @cached_property
    def number(self) -> float:
        """The units, read from their device."""
        return float(check_units(self.units))

    @cached_property
    def parts(self) -> list[Part]:
        """What the graph shows that the loss adds up; of a mean without its units."""
        parts = parts_of(self.loss)
        return (without_units(parts, self.number) or parts) if self.is_mean else parts


class Check:
    """One law of an own loop. By default it has nothing to say."""

    only_first: ClassVar[bool] = True
    """True if it is asked in the first window alone, False if in windows 1, 2, 4, 8, ..."""

    def window_begins(self) -> None:
        """Forget the window before."""

    def loss_is_known(self, micro: LossOfMicroBatch) -> Iterable[str]:
        """Look at a loss before its backward."""
        return ()


def silenced(begin: str) -> str:
    """Return how to silence a warning that begins like this."""
    return f'warnings.filterwarnings("ignore", "{begin}") silences this warning'
