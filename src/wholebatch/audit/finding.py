"""What keeps micro-batches from the update of the whole batch: its name, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from wholebatch.errors import LossError, UnsupportedError

MISTAKES = ("mean", "sum", "units")
"""The kinds of findings that are mistakes of the loss function, told by its numbers."""
OF_STATE = ("state", "outside", "frequency")
"""The kinds of findings that are so whatever the rows of a batch are."""
UNTESTED = ("untested", "unrunnable")
"""The kinds of findings of a loss that has no value for a part of the samples, or cannot run."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One layer, attribute or function: its name, its class, how it was found and what to do."""

    name: str
    type: str
    kind: str
    advice: str

    def __str__(self) -> str:
        kind = "" if self.type == self.name else f" ({self.type})"
        return f"{self.name or 'the model itself'}{kind}: {self.advice}"


Findings: TypeAlias = Sequence[AuditFinding]


def refuse(findings: Findings, off: str = "audit=False", *, on_another_rank: bool = False) -> None:
    """Raise an error if a cause was found, here or on another rank.

    `off` is the option with which a user of this entry point trains all the same.
    """
    if not findings and not on_another_rank:
        return
    listed = "\n  ".join(map(str, findings)) or "(found on another rank)"
    message = (
        "micro-batches cannot give the update of the whole batch here:\n  "
        f"{listed.rstrip('.')}.\n{off} skips this test; the update may then differ from that "
        "of the whole batch"
    )
    mistaken = findings and all(finding.kind in MISTAKES for finding in findings)
    raise LossError(message) if mistaken else UnsupportedError(message)
