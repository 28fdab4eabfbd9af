"""Verdicts on a model and on a loop: one line, the worst parameters and the causes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wholebatch.plain_files import finite
from wholebatch.readable_sizes import percent
from wholebatch.verification.mistakes import (
    MISTAKES,
    NOT_JUDGED,
    RIGHT,
    Mistake,
    MistakeFit,
    texts_in,
)
from wholebatch.verification.run_comparison import Comparison, listed


@dataclass(frozen=True)
class Cause:
    """One reason why two updates differ: its kind, the place, the evidence, and what to do."""

    kind: str
    where: tuple[str, ...]
    evidence: str
    advice: str

    def __str__(self) -> str:
        where = f" in {listed(self.where)}" if self.where else ""
        return f"{self.kind}{where}: {'. '.join(filter(None, (self.evidence, self.advice)))}"


_CAUSES = texts_in("causes.md")


def cause(key: str, where: Sequence[str] = (), **found: Any) -> Cause:
    """Return the cause of this key, with what was found put into its words."""
    kind, evidence, advice = _CAUSES[key]
    return Cause(kind, tuple(where), evidence.format(**found), advice.format(**found))


class _Answer:
    """The parts of a verdict that follow from its `same` and its `to_dict`."""

    def __repr__(self: Any) -> str:
        return f"<{type(self).__name__}: {self.line}>"

    def __bool__(self: Any) -> bool:
        return bool(self.same)

    def to_dict(self: Any) -> dict[str, Any]:
        """Return everything as plain data; numbers that are not finite become None."""
        names = ("same", "judged", "mistakes", "line", "table", "advice", "notes")
        also = [name for name in names if hasattr(self, name)]
        return {**finite(asdict(self)), **{name: finite(getattr(self, name)) for name in also}}

    def to_json(self: Any, *, indent: int | None = 2) -> str:
        """Return the verdict as JSON; `same` is the answer."""
        return json.dumps(self.to_dict(), indent=indent)

    @property
    def exit_status(self: Any) -> int:
        """Return 0 if the update is the same, 1 if it differs, 3 if that could not be judged."""
        return 0 if self.same else 1 if getattr(self, "judged", True) else 3


@dataclass(frozen=True, repr=False)
class Verdict(_Answer):
    """The verdict on one model and batch: does accumulation make the undivided batch's update?

    It is true if it does. `gradient` and `update` compare the optimizer's input and its step in the
    given precision; `float64` compares the gradients again in float64.
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
    undivided: bool
    """True if the batch was not split, because a BatchNorm trains with all of it."""
    precision: str
    device: str
    ranks: int
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def line(self) -> str:
        """Return the verdict in one line."""
        split = f" in {self.micro_batches} micro-batches"
        size = f"{self.samples} samples{', not split (BatchNorm)' if self.undivided else split}"
        if self.samples < self.of_samples:
            size += f" (of {self.of_samples}: more do not fit undivided)"
        if self.ranks > 1:
            size += f" on each of {self.ranks} ranks"
        measured = ", ".join(
            f"{one.what} {percent(one.distance)} off ({percent(one.tolerance)} is rounding)"
            for one in (self.gradient, self.update, self.float64)
            if one is not None
        )
        if self.same:
            return f"same update: {measured}; {size}"
        because = f"; {self.causes[0].kind}" if self.causes else ""
        if self.causes and self.causes[0].where:
            because += f" in {listed(self.causes[0].where)}"
        return f"DIFFERENT update: {measured}; {size}{because}"

    def __str__(self) -> str:
        parts = [self.line]
        if not self.same:
            rows = [
                (one.name, percent(one.distance), percent(one.floor), "differs" * one.differs)
                for one in self.gradient.worst(8)
            ]
            parts.append(_table(("parameter", "gradient off by", "rounding alone", ""), rows))
        parts += [f"cause: {cause}" for cause in self.causes]
        parts += [f"note: {note}" for note in self.notes]
        return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns of plain text, two spaces apart."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    )


@dataclass(frozen=True)
class LoopTrial:
    """One window that the loop was given, what it did, and the mistake that explains it."""

    case: str
    name: str
    micro_batches: int
    units: tuple[float, ...]
    optimizer_steps: int
    found: str | None
    """The key of what fits: "right", a mistake, "not judged", or None where nothing does."""
    fits: tuple[MistakeFit, ...]
    """All hypotheses, the nearest first, one variant of each."""
    tolerance: float
    floor: float
    observed_by: str
    notes: tuple[str, ...] = ()

    @property
    def right(self) -> MistakeFit:
        """Return the fit of the right gradient."""
        return next(fit for fit in self.fits if fit.key == RIGHT)

    @property
    def differs(self) -> bool:
        """True if this window is not the update of the undivided batch."""
        return self.found not in (RIGHT, NOT_JUDGED)

    @property
    def found_fit(self) -> MistakeFit | None:
        """Return the fit of the mistake that was found; None if right, or if no mistake fits."""
        return next((f for f in self.fits if f.key == self.found != RIGHT), None)


EQUAL_UNITS = (
    "all micro-batches have the same number of units, so a mean of means equals the mean here"
)
GIVEN_UNITS = "ledger, with units as given"
"""How a window is observed whose units the loop gave to `Accumulator.backward`."""
WEIGHED = (
    *("not-divided", "divided-twice", "mean-of-means", "nominal-count", "other-units", "no-update"),
    *("ranks-added", "world-size-forgotten"),
)
"""Mistakes in how micro-batches are weighed, which the adapter of a trainer mends."""
_IN_TRAINERS = {
    "HF Trainer": "from wholebatch.integrations.transformers import exact; then "
    "trainer = exact(Trainer)(model=model, args=args, ...)",
    "TRL": "from wholebatch.integrations.transformers import exact; then "
    "trainer = exact(SFTTrainer)(model=model, args=args, ...), or with your trainer's class",
    "Accelerate": "from wholebatch.integrations.accelerate import AccelerateAccumulator; then "
    "windows = AccelerateAccumulator(accelerator, model, optimizer), and "
    "windows.backward(mean=loss, units=...) instead of accelerator.backward(loss)",
    "Lightning": "from wholebatch.integrations.lightning import ExactAccumulation; then "
    "Trainer(callbacks=[ExactAccumulation(units=lambda batch: ...)], ...)",
}


@dataclass(frozen=True)
class Watched:
    """The part of a loop that a watch has seen, and the parts that it has not judged."""

    windows: int
    """Windows that were seen, of the optimizer that made most."""
    end: bool | None
    """True if the end of the data was among them; None if no DataLoader was seen."""
    not_judged: tuple[str, ...]
    """Parameters that had gradients, and no optimizer step that was seen."""
    trainer: str
    error: str = ""
    """The error that ended the loop; empty if none did."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a verdict says of the part that was looked at."""
        ends = {
            True: "the end of the data was among them",
            False: "the end of the data was not among them",
            None: "the end of the data is not known: no DataLoader was seen to give its batches",
        }
        seen = f"{self.windows} window{'' if self.windows == 1 else 's'} seen; {ends[self.end]}"
        notes = (seen, "averages of the weights and the schedule's length were not judged")
        if not self.not_judged:
            return notes
        return *notes, f"not judged, no optimizer step was seen: {listed(self.not_judged)}"


@dataclass(frozen=True, repr=False)
class LoopVerdict(_Answer):
    """The answer if a loop makes the update of the undivided batch; true if so in every trial."""

    loop: str
    trials: tuple[LoopTrial, ...]
    precision: str
    ranks: int
    seconds: float
    watched: Watched | None = None

    @property
    def same(self) -> bool:
        return bool(self.trials) and all(trial.found == RIGHT for trial in self.trials)

    @property
    def judged(self) -> bool:
        """True if there is an answer: every window could be judged, or one of them differs."""
        return self.same or any(trial.differs for trial in self.trials)

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Return the keys of the mistakes, that of the simplest window first."""
        fits = [trial.found_fit for trial in self.trials]
        return tuple(dict.fromkeys(fit.key for fit in fits if fit is not None))

    @property
    def mistake(self) -> Mistake | None:
        """Return the mistake to fix first."""
        return MISTAKES[self.mistakes[0]] if self.mistakes else None

    @property
    def line(self) -> str:
        """Return the verdict in one line; an error that ended the loop comes first."""
        if self.watched is not None and self.watched.error:
            return f"{self.watched.error}; until then: {self._line}"
        return self._line

    @property
    def _line(self) -> str:
        where = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        windows = f"{len(self.trials)} window{'s'[: len(self.trials) - 1]}{where}"
        observed = {trial.observed_by for trial in self.trials}
        if self.same and GIVEN_UNITS in observed:
            return (
                f"same update, if its units are right: {self.loop} over {windows}; the units given "
                "to backward() were taken as given and are not judged: test them with wb.verify or "
                "acc.run"
            )
        if self.same and observed == {"ledger"}:
            return f"same update: {self.loop} over {windows} of wholebatch, read from its ledger"
        if self.same:
            worst = max(self.trials, key=lambda trial: trial.right.distance / trial.tolerance)
            return (
                f"same update: {self.loop} is at most {percent(worst.right.distance)} from the "
                f"undivided batch over {windows}; rounding explains {percent(worst.tolerance)}"
            )
        if not self.judged:
            reasons = dict.fromkeys(n for t in self.trials if t.found != RIGHT for n in t.notes)
            return f"NOT JUDGED: {self.loop}{where}: {'; '.join(reasons) or 'no window was seen'}"
        first = next(trial for trial in self.trials if trial.differs)
        off, fit = percent(first.right.distance), first.found_fit
        if fit is None:
            near = first.fits[0]
            return (
                f"DIFFERENT update: {self.loop} is {off} off{where}, and no known mistake fits "
                f"(nearest: {near.name}, {percent(near.distance)} away)"
            )
        also = [MISTAKES[key].name for key in self.mistakes if key != fit.key]
        more = f"; also: {', '.join(also)}" if also else ""
        what = "update" if first.observed_by == "updates" else "gradient"
        is_seen = first.case == "live" and fit.key != "no-update"  # in the weights of the losses
        if is_seen or not math.isfinite(first.right.distance):  # without a gradient to compare
            return f"DIFFERENT update: {fit.name}: {self.loop}: {fit.variant}{where}{more}"
        left = f"to within {percent(fit.distance)}" if fit.distance else "exactly"
        return (
            f"DIFFERENT update: {fit.name}: the {what} of {self.loop} is {off} off, and this "
            f"mistake explains it {left} ({fit.variant}){where}{more}"
        )

    def __str__(self) -> str:
        if self.watched is not None and not (self.watched.windows or self.watched.not_judged):
            return self.line
        head, *rows = self.table
        first = 0 if any(row[0] for row in rows) else 1  # a watched loop has no name of a model
        parts = [self.line, _table(head[first:], [row[first:] for row in rows])]
        for name, does, instead in self.advice:
            parts += [f"{name}: {does}", f"instead: {instead}"]
        return "\n".join([*parts, *(f"note: {note}" for note in self.notes)])

    @property
    def table(self) -> list[tuple[str, ...]]:
        """Return the head and the rows of the table of windows."""
        rows: list[tuple[str, ...]] = [("model", "window", "steps", "off by", "found")]
        before = ""
        for trial in self.trials:
            far, fit = trial.right.distance, trial.found_fit
            is_measured = math.isfinite(far) and not trial.observed_by.startswith("ledger")
            off = percent(far) if is_measured and trial.optimizer_steps <= 1 else "–"
            marks = {RIGHT: "✓ right", NOT_JUDGED: "? not judged", None: "✗ no known mistake"}
            found = f"✗ {fit.name}" if fit else marks[trial.found]
            if trial.found == RIGHT and trial.observed_by == GIVEN_UNITS:
                found = "✓ right for the units given"
            case = "" if trial.case in (before, "live") else trial.case
            before = trial.case
            rows.append((case, trial.name, str(trial.optimizer_steps), off, found))
        return rows

    @property
    def advice(self) -> list[tuple[str, str, str]]:
        """Return, for each mistake, its name, what it does and what to do instead."""
        return [
            (MISTAKES[key].name, MISTAKES[key].does, self._instead(key)) for key in self.mistakes
        ]

    @property
    def notes(self) -> list[str]:
        """Return the notes of all windows and of the watch, each once."""
        notes = dict.fromkeys(note for trial in self.trials for note in trial.notes)
        if self.watched is None:
            return [*notes]
        units = [trial.units for trial in self.trials if len(trial.units) > 1]
        is_read = self.same and not any(t.observed_by.startswith("ledger") for t in self.trials)
        if is_read and units and all(math.isclose(min(u), max(u), rel_tol=1e-3) for u in units):
            notes[EQUAL_UNITS] = None
        return [*notes | dict.fromkeys(self.watched.notes)]

    def _instead(self, key: str) -> str:
        """Return what to do, in the trainer at hand."""
        trainer = "" if self.watched is None else self.watched.trainer
        return (
            _IN_TRAINERS.get(trainer, MISTAKES[key].instead)
            if key in WEIGHED
            else MISTAKES[key].instead
        )
