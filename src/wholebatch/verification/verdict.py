"""What a proof found: one line, the worst parameters, and why, for people and for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wholebatch.core.json_files import finite
from wholebatch.verification.run_distance import Comparison

__all__ = ["Cause", "Verdict", "said", "table"]


@dataclass(frozen=True)
class Cause:
    """Why two updates differ: what kind of thing, where, the evidence, and what to do."""

    kind: str
    where: tuple[str, ...]
    evidence: str
    advice: str

    def __str__(self) -> str:
        where = f" in {_listed(self.where)}" if self.where else ""
        return f"{self.kind}{where}: {self.evidence}. {self.advice}"


@dataclass(frozen=True)
class Verdict:
    """Whether accumulation makes the update of the undivided batch, on this model and batch.

    True where it does. `gradient` and `update` compare what the optimizer saw and did, in the
    precision asked for; `float64` compares the gradients again with twice the digits.
    """

    same: bool
    gradient: Comparison
    update: Comparison
    float64: Comparison | None
    to_float64: tuple[float, float] | None
    losses: tuple[float, float]
    samples: int
    of_samples: int
    micro_batches: int
    precision: str
    device: str
    ranks: int
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    seconds: float
    approximate: bool = False
    """Whether an approximation was asked for (`gradients="moments"`): never the same."""

    def __bool__(self) -> bool:
        return self.same

    @property
    def line(self) -> str:
        """The verdict in one line."""
        size = f"{self.samples} samples in {self.micro_batches} micro-batches"
        if self.samples < self.of_samples:
            size += f" (of {self.of_samples}: more do not fit undivided)"
        if self.ranks > 1:
            size += f" on each of {self.ranks} ranks"
        measured = ", ".join(
            f"{one.what} {said(one.distance)} off ({said(one.tolerance)} is rounding)"
            for one in (self.gradient, self.update, self.float64)
            if one is not None
        )
        if self.same:
            return f"same update: {measured}; {size}"
        if self.approximate:
            return f"APPROXIMATE update: {measured}; {size}"
        because = f"; {self.causes[0].kind}" if self.causes else ""
        if self.causes and self.causes[0].where:
            because += f" in {_listed(self.causes[0].where)}"
        return f"DIFFERENT update: {measured}; {size}{because}"

    def __str__(self) -> str:
        parts = [self.line]
        if not self.same and not self.approximate:
            rows = [
                (
                    line.name,
                    said(line.distance),
                    said(line.floor),
                    "differs" if line.differs else "",
                )
                for line in self.gradient.worst(8)
            ]
            parts.append(table(("parameter", "gradient off by", "rounding alone", ""), rows))
        parts += [f"cause: {cause}" for cause in self.causes]
        parts += [f"note: {note}" for note in self.notes]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; numbers that are not finite become None."""
        data: dict[str, Any] = finite(asdict(self))
        data["line"] = self.line
        return data

    def to_json(self, *, indent: int | None = 2) -> str:
        """The verdict for a machine; `same` is the answer."""
        return json.dumps(self.to_dict(), indent=indent)

    @property
    def exit_status(self) -> int:
        """0 where the update is the same, 1 where it differs."""
        return 0 if self.same else 1


def said(value: float) -> str:
    """
    >>> said(0.334), said(2.04e-7), said(0.0), said(7.3), said(731)
    ('33%', '2.0e-07', '0', '730%', '7.3e+02 times')
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return "infinitely far"
    if value >= 10:
        return f"{value:.2g} times"
    return (
        f"{float(f'{value:.2g}'):.0%}"
        if value >= 0.095
        else f"{value:.1e}"
        if value < 0.001
        else f"{value:.2%}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of plain text, two spaces apart."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name or "(the model itself)" for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
