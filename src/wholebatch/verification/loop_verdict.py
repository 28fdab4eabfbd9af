"""What was found about someone's training loop: right, or which mistake, with the distances."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from wholebatch.core.json_files import finite
from wholebatch.verification.mistakes import MISTAKES, RIGHT, Mistake
from wholebatch.verification.verdict import said, table

__all__ = ["Fit", "LoopVerdict", "Trial"]


@dataclass(frozen=True)
class Fit:
    """How far the observed gradients are from those of one hypothesis."""

    key: str
    variant: str
    distance: float
    fits: bool

    @property
    def name(self) -> str:
        return "right" if self.key == RIGHT else MISTAKES[self.key].name


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
