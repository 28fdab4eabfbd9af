"""The known mistakes: what each does, and what to do instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mistake:
    """A known mistake: its name, what it does, and what to do instead."""

    name: str
    does: str
    instead: str


def texts_in(name: str) -> dict[str, list[str]]:
    """Return the rows of a table in Markdown beside this file, by their keys."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()[4:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {key: texts for key, *texts in rows}


MISTAKES = {key: Mistake(*texts) for key, texts in texts_in("mistakes.md").items()}


@dataclass(frozen=True)
class Finding:
    """A mistake that explains a window: its key in `MISTAKES`, and how it shows."""

    key: str
    variant: str
    is_beside: bool = False
    """True if it goes wrong beside the weights, which may be wrong as well."""

    @property
    def name(self) -> str:
        return MISTAKES[self.key].name


STEPPED_TWICE = Finding("two-owners", "two optimizers step on the same gradients")
