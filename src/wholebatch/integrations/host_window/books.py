"""What is known of a host's open window, and how it is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from wholebatch.core.close import read_scalars
from wholebatch.core.loss import Units
from wholebatch.errors import StateError, WindowError

__all__ = ["Books", "Settled"]


@dataclass(frozen=True)
class Settled:
    """What a window was: its exact mean loss over all units of all ranks."""

    loss: float
    units: float
    micro_batches: int


@dataclass
class Books:
    """The losses that were weighed, and how far their backwards have come."""

    seed: float = 1.0
    divided_by: float = 1.0
    totals: list[Tensor | float] = field(default_factory=list)
    units: list[Units] = field(default_factory=list)
    micro_batches: int = 0
    flowed: int = 0  # losses whose backward came
    begun: bool = False  # whether the first backward was let through
    broken: bool = False
    reduced: bool = True  # whether the engine reduced in the last backward

    def weighing(self, weight: Units) -> Callable[[Tensor], Tensor]:
        """Return the hook of a loss that multiplies what its backward begins with."""

        def weigh(gradient: Tensor) -> Tensor:
            self.flowed += 1
            if isinstance(weight, Tensor):
                return gradient * weight.to(gradient.device, gradient.dtype)
            return gradient * weight

        return weigh

    def check_complete(self, ranks: int, *, in_grad: bool) -> None:
        """Refuse a loss without its backward, and gradients that were not reduced."""
        if in_grad and self.flowed != self.micro_batches:
            raise WindowError(
                f"{self.micro_batches} losses were weighed in this window, and {self.flowed} "
                "backwards came: every loss needs its one backward, so that its units are counted "
                "with its gradient"
            )
        if ranks > 1 and not self.reduced:
            raise WindowError(
                "the last backward of this window did not reduce the gradients over the "
                f"{ranks} processes: the last micro-batch must make its backward, outside of "
                "no_sync (units=0 for one that does not count)"
            )

    def saved(self) -> dict[str, Any]:
        """Return them as numbers."""
        return {
            "micro_batches": self.micro_batches,
            "seed": self.seed,
            "divided_by": self.divided_by,
            "totals": read_scalars(self.totals),
            "units": read_scalars(self.units),
        }

    @classmethod
    def loaded(cls, saved: Any) -> Books:
        """Return the books that `saved` wrote down, ready for the next micro-batch."""
        if not isinstance(saved, dict) or "micro_batches" not in saved:
            raise StateError("this is not the state of a window (it has no 'micro_batches')")
        count = saved["micro_batches"]
        return cls(
            seed=saved["seed"],
            divided_by=saved["divided_by"],
            totals=list(saved["totals"]),
            units=list(saved["units"]),
            micro_batches=count,
            flowed=count,
            begun=count > 0,
        )
