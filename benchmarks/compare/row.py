"""One line of the comparison, and what every library is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CASES", "DOCUMENTED", "LAWS", "LIBRARIES", "LIMITS", "SPLITS", "Row"]

SPLITS = ("equal", "uneven", "short tail", "masked tokens", "clipped", "two processes")
LAWS = ("BatchNorm statistics", "bf16 × 256", "contrastive", "NaN", "resume")
CASES = (*SPLITS, *LAWS)
"""The cases every library is held to, in the order of the table.

equal: micro-batches of one size, full windows. uneven: micro-batches of different sizes. short
tail: an epoch whose last window has fewer micro-batches than the others. masked tokens: a loss
that is a mean over tokens, of which each micro-batch has another number. clipped: masked tokens,
with clipping by norm at a norm that always binds. two processes: masked tokens on two data-parallel
processes (or two devices of one process) with different numbers of tokens.

BatchNorm statistics: running mean and variance of a BatchNorm. bf16 × 256: the gradient of 256
micro-batches in bf16. contrastive: a plain loss that compares all samples. NaN: one in the second
of two windows. resume: after a checkpoint in the middle of a window.
"""

LIMITS = {"float64": 1e-12, "float32": 1e-6, "bf16": 1e-5, "bf16 result": 2.0**-8}
"""What wholebatch's error may be, by precision.

"bf16": summed and looked at in float32. "bf16 result": the gradient itself is given in bf16, and
rounding it once is up to 2⁻⁹ of it; sums in bf16 are further off.
"""

DOCUMENTED = "wrong, documented"
"""Where the loss is never seen, so that it can neither be exact nor refused; the page says so."""

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
    own: float | str | None
    """Error of the library's own accumulation ("NaN": the weights are lost); None: it has none."""
    ours: float | str
    """Error of wholebatch in it, "refused", or DOCUMENTED."""
    precision: str
    """A key of LIMITS: what the model, the data and the gradients were in."""
    note: str = ""

    @property
    def keeps(self) -> bool:
        """True if wholebatch is within its limit, has refused, or its page says it is wrong."""
        if isinstance(self.ours, str):
            return self.ours in ("refused", DOCUMENTED)
        return self.ours <= LIMITS[self.precision]

    def __post_init__(self) -> None:
        if self.case not in CASES:
            raise ValueError(f"case={self.case!r}: must be one of {', '.join(CASES)}")
        if self.precision not in LIMITS:
            raise ValueError(f"precision={self.precision!r}: must be one of {', '.join(LIMITS)}")
