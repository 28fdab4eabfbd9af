"""What a look at a model has found: where, of what kind, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One layer, attribute or function: its name, its class, how it was found and what to do."""

    name: str
    type: str
    kind: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name or '(the model itself)'} ({self.type}): {self.advice}"
