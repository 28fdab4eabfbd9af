"""One line of the comparison, and what every library is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CASES", "LIBRARIES", "LIMITS", "Row"]

CASES = ("equal", "uneven", "short tail", "masked tokens", "clipped", "two processes")
"""The cases every library is held to, in the order of the table.

equal: micro-batches of one size, full windows. uneven: micro-batches of different sizes. short
tail: an epoch whose last window has fewer micro-batches than the others. masked tokens: a loss
that is a mean over tokens, of which each micro-batch has another number. clipped: masked tokens,
with clipping by norm at a norm that always binds. two processes: masked tokens on two data-parallel
processes (or two devices of one process) with different numbers of tokens.
"""

LIMITS = {"float64": 1e-12, "float32": 1e-6}
"""What wholebatch's error may be, by precision."""

LIBRARIES: Mapping[str, Mapping[str, str]] = {
    "accelerate": {},
    "lightning": {},
    "fabric": {},
    "transformers": {},
    "trl": {},
    "keras_tensorflow": {"KERAS_BACKEND": "tensorflow"},
    "keras_jax": {"KERAS_BACKEND": "jax"},
    "keras_torch": {"KERAS_BACKEND": "torch"},
    "jax": {},
}
"""The modules of this package that have rows, each with the environment of its process."""


@dataclass(frozen=True)
class Row:
    """One case in one library: the errors of its own accumulation and of wholebatch in it."""

    library: str
    """As a reader knows it, with its version: "Lightning 2.6.6"."""
    case: str
    """One of CASES."""
    own: float | None
    """Error of the library's own accumulation; None: it has none."""
    ours: float
    """Error of wholebatch in it."""
    precision: str
    """A key of LIMITS: what the model, the data and the gradients were in."""
    note: str = ""

    @property
    def keeps(self) -> bool:
        """True if wholebatch is within its limit."""
        return self.ours <= LIMITS[self.precision]

    def __post_init__(self) -> None:
        if self.case not in CASES:
            raise ValueError(f"case={self.case!r}: must be one of {', '.join(CASES)}")
        if self.precision not in LIMITS:
            raise ValueError(f"precision={self.precision!r}: must be one of {', '.join(LIMITS)}")
