"""Verdicts on a model and on a loop: one line, the worst parameters and the causes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wholebatch.core.json_files import finite
from wholebatch.verification.mistakes import MISTAKES, RIGHT, Fit, Mistake
from wholebatch.verification.run_comparison import Comparison, said

__all__ = ["Cause", "Fit", "LoopVerdict", "Trial", "Verdict", "said", "table"]


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


@dataclass(frozen=True)
class Trial:
    """One window that the loop was given, what it did, and what that is."""

    case: str
    name: str
    micro_batches: int
    units: tuple[float, ...]
    optimizer_steps: int
    found: str | None
    """The key of what fits: "right", a mistake, or None where nothing does."""
    fits: tuple[Fit, ...]
    """All hypotheses, the nearest first, one variant of each."""
    tolerance: float
    floor: float
    observed_by: str
    notes: tuple[str, ...] = ()

    @property
    def right(self) -> Fit:
        return next(fit for fit in self.fits if fit.key == RIGHT)


@dataclass(frozen=True)
class LoopVerdict:
    """Whether a loop makes the update of the undivided batch; true if it does, on every trial."""

    loop: str
    trials: tuple[Trial, ...]
    precision: str
    ranks: int
    seconds: float

    @property
    def same(self) -> bool:
        return all(trial.found == RIGHT for trial in self.trials)

    def __bool__(self) -> bool:
        return self.same

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Keys of the mistakes, that of the simplest window first."""
        keys = [trial.found for trial in self.trials if trial.found not in (RIGHT, None)]
        return tuple(dict.fromkeys(key for key in keys if key is not None))

    @property
    def mistake(self) -> Mistake | None:
        """The mistake to mend first."""
        return MISTAKES[self.mistakes[0]] if self.mistakes else None

    @property
    def line(self) -> str:
        """The verdict in one line."""
        where = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        if self.same:
            worst = max(self.trials, key=lambda trial: trial.right.distance / trial.tolerance)
            return (
                f"same update: {self.loop} is at most {said(worst.right.distance)} from the "
                f"undivided batch over {len(self.trials)} windows{where}; rounding explains "
                f"{said(worst.tolerance)}"
            )
        first = next(trial for trial in self.trials if trial.found != RIGHT)
        if first.found is None:
            near = first.fits[0]
            return (
                f"DIFFERENT update: {self.loop} is {said(first.right.distance)} off{where}, and no "
                f"known mistake fits (nearest: {near.name}, {said(near.distance)} away)"
            )
        fit = next(f for f in first.fits if f.key == first.found)
        also = [MISTAKES[key].name for key in self.mistakes if key != first.found]
        more = f"; also: {', '.join(also)}" if also else ""
        return (
            f"DIFFERENT update: {MISTAKES[first.found].name}: {self.loop} is "
            f"{said(first.right.distance)} from the right gradient and {said(fit.distance)} from "
            f"that of this mistake ({fit.variant}){where}{more}"
        )

    def __str__(self) -> str:
        parts = [self.line]
        rows = []
        for trial in self.trials:
            found = "no known mistake" if trial.found is None else _name(trial.found)
            fit = next((f for f in trial.fits if f.key == trial.found), trial.fits[0])
            rows.append(
                (
                    f"{trial.case}: {trial.name}",
                    str(trial.optimizer_steps),
                    said(trial.right.distance),
                    found,
                    said(fit.distance) if trial.found not in (RIGHT, None) else "",
                )
            )
        parts.append(table(("window", "steps", "off by", "found", "off from that"), rows))
        for key in self.mistakes:
            mistake = MISTAKES[key]
            parts.append(f"{mistake.name}: {mistake.does}. Instead: {mistake.instead}.")
        notes = dict.fromkeys(note for trial in self.trials for note in trial.notes)
        parts += [f"note: {note}" for note in notes]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; numbers that are not finite become None."""
        data: dict[str, Any] = finite(asdict(self))
        data |= {"same": self.same, "mistakes": list(self.mistakes), "line": self.line}
        return data

    def to_json(self, *, indent: int | None = 2) -> str:
        """The verdict for a machine; `same` is the answer."""
        return json.dumps(self.to_dict(), indent=indent)

    @property
    def exit_status(self) -> int:
        """0 where the loop is right, 1 where it is not."""
        return 0 if self.same else 1


def _name(key: str) -> str:
    return "right" if key == RIGHT else MISTAKES[key].name
