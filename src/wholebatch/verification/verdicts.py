"""Verdicts on a model and on a loop: one line, the worst parameters and the causes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from wholebatch.plain_files import finite
from wholebatch.readable_sizes import percent
from wholebatch.verification.distances import Comparison
from wholebatch.verification.findings import MISTAKES, Finding, Mistake, listed, micro_batches
from wholebatch.verification.weights import Weights


class _Answer:
    """The parts of a verdict that follow from its line, table, advice and notes."""

    def __repr__(self: Any) -> str:
        return f"<{type(self).__name__}: {self.line}>"

    def __bool__(self: Any) -> bool:
        return bool(self.same)

    def __str__(self: Any) -> str:
        parts = [self.line, *_columns(self.table)]
        for name, why, instead in self.advice:
            parts += [": ".join(filter(None, (name, why))), f"instead: {instead}"]
        return "\n".join([*parts, *(f"note: {note}" for note in self.notes)])

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
    losses: tuple[float, ...]
    """Of the undivided batch, and of the window."""
    samples: int
    of_samples: int
    micro_batches: int
    undivided: bool
    """True if the batch was not split, because a BatchNorm trains with all of it."""
    precision: str
    device: str
    ranks: int
    causes: tuple[Finding, ...]
    notes: tuple[str, ...]
    seconds: float = 0.0

    @property
    def advice(self) -> list[tuple[str, str, str]]:
        """Return, for each cause, its name and place, what shows it and what to do instead."""
        return [(cause.place, cause.variant, cause.instead) for cause in self.causes]

    @property
    def table(self) -> list[tuple[str, ...]]:
        """Return the head and the rows of the table of the worst parameters."""
        head = ("parameter", "gradient off by", "rounding alone", "")
        rows = [
            (line.name, percent(line.distance), percent(line.floor), "differs" * line.differs)
            for line in self.gradient.worst(8)
        ]
        return [] if self.same else [head, *rows]

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
            f"{part.what} {percent(part.distance)} off ({percent(part.tolerance)} is rounding)"
            for part in (self.gradient, self.update, self.float64)
            if part is not None
        )
        if self.same:
            return f"same update: {measured}; {size}"
        because = f"; {self.causes[0].place}" if self.causes else ""
        return f"DIFFERENT update: {measured}; {size}{because}"


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table as plain text; a column that says nothing is left out."""
    kept = [column for column in zip(*table, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    rows = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*kept, strict=True)
    ]
    return [f"  {row}".rstrip() for row in rows]


RIGHT, DIFFERENT, NOT_JUDGED = "right", "different", "not judged"
"""The answers on a window."""
EQUAL_UNITS = (
    "all micro-batches have the same number of units, so a mean of means equals the mean here"
)


@dataclass(frozen=True)
class LoopTrial:
    """One window of the loop: the answer, and the mistakes that explain a difference."""

    name: str
    case: str = "live"
    answer: str = NOT_JUDGED
    findings: tuple[Finding, ...] = ()
    """All mistakes that explain it, the likeliest first."""
    micro_batches: int = 0
    units: tuple[float, ...] = ()
    off: float = math.inf
    """The distance from the right weights."""
    source: str = ""
    """Where the units come from: "weights" of the losses, or a "ledger"."""
    own: tuple[float, ...] = ()
    """The weight that each term of the loss has of its own."""
    notes: tuple[str, ...] = ()
    lines: Mapping[str, str] = field(default_factory=dict)
    """Where the loss, the backward and the step stand, as file:line."""

    def with_answer(
        self, answer: str, reason: str = "", findings: Sequence[Finding] = ()
    ) -> LoopTrial:
        """Return the trial with its answer; the reason is the first note."""
        notes = (reason, *self.notes) if reason else self.notes
        if answer == RIGHT:
            own = [weight for weight in self.own if weight != 1.0]
            notes += tuple(f"the loss has a weight of {weight:g} of its own" for weight in own)
        return replace(self, answer=answer, findings=tuple(findings), notes=notes)

    def with_weights(self, weights: Weights) -> LoopTrial:
        """Return the trial with what is known of its weights."""
        units = weights.units
        kind = ""
        if len(units) > 1:
            is_even = all(math.isclose(unit, units[0], rel_tol=1e-3) for unit in units)
            kind = "equal " if is_even else "uneven "
        size = micro_batches(len(units), kind)
        return replace(
            self,
            name=f"{self.name}: {size}",
            micro_batches=len(units),
            units=units,
            off=weights.off,
            source=weights.source,
            own=weights.own,
        )


def consistent(trials: Sequence[LoopTrial]) -> tuple[LoopTrial, ...]:
    """Put the mistake first that explains most windows, where several explain one."""
    votes = Counter(finding.key for trial in trials for finding in trial.findings)

    def likeliest(trial: LoopTrial) -> LoopTrial:
        ordered = sorted(trial.findings, key=lambda f: (f.is_beside, -votes[f.key]))
        return replace(trial, findings=tuple(ordered))

    return tuple(map(likeliest, trials))


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
    other_optimizers: tuple[str, ...] = ()
    """Optimizers that have stepped on parameters that were not watched."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a verdict says of the part that was looked at."""
        ends = {
            True: "the end of the data was among them",
            False: "the end of the data was not among them",
            None: "the end of the data is not known: no DataLoader was seen to give its batches",
        }
        windows = f"{self.windows} window{'' if self.windows == 1 else 's'} seen; {ends[self.end]}"
        notes = [windows]
        if self.not_judged:
            notes.append(f"not judged, no optimizer step was seen: {listed(self.not_judged)}")
        notes += [
            f"not judged: {name}, whose parameters belong to no module that the loop calls"
            for name in self.other_optimizers
        ]
        return tuple(notes)


@dataclass(frozen=True, repr=False)
class LoopVerdict(_Answer):
    """The answer if a loop makes the update of the undivided batch; true if so in every trial."""

    loop: str
    trials: tuple[LoopTrial, ...]
    ranks: int
    seconds: float
    watched: Watched | None = None

    @property
    def same(self) -> bool:
        return bool(self.trials) and all(trial.answer == RIGHT for trial in self.trials)

    @property
    def judged(self) -> bool:
        """True if there is an answer: every window could be judged, or one of them differs."""
        return self.same or any(trial.answer == DIFFERENT for trial in self.trials)

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Return the keys of the mistakes, that of the simplest window first."""
        first = [finding for trial in self.trials for finding in trial.findings[:1]]
        beside = [f for trial in self.trials for f in trial.findings if f.is_beside]
        return tuple(dict.fromkeys(finding.key for finding in (*first, *beside)))

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
        if self.same:
            windows = f"{len(self.trials)} window{'s'[: len(self.trials) - 1]}{where}"
            return self._same_line(windows)
        if not self.judged:
            reasons = dict.fromkeys(
                note for trial in self.trials if trial.answer != RIGHT for note in trial.notes
            )
            return f"NOT JUDGED: {self.loop}{where}: {'; '.join(reasons) or 'no window was seen'}"
        first = next(trial for trial in self.trials if trial.answer == DIFFERENT)
        off = f"{percent(first.off)} off" if math.isfinite(first.off) else "not the right one"
        if not first.findings:
            return f"Wrong: the gradient of {self.loop} is {off}{where}, and no known mistake fits"
        finding = first.findings[0]
        either = [f.name for f in first.findings[1:] if not f.is_beside]
        also = [MISTAKES[key].name for key in self.mistakes if key != finding.key]
        more = f" (or: {', '.join(either)})" if either else ""
        more += f"; also: {', '.join(also)}" if also else ""
        return f"Wrong: {finding.name}: {self.loop}: {finding.variant}{where}{more}"

    def _same_line(self, windows: str) -> str:
        sources = {trial.source for trial in self.trials}
        if all(source.startswith("ledger") for source in sources):
            are_given = "" if sources == {"ledger"} else ", if its units are right"
            line = (
                f"same update by construction{are_given}: {self.loop} over {windows} of "
                "wholebatch, which weighs each micro-batch by its units. Measured: no micro-batch "
                "is left over; weights, rates and buffers stay the same within a window"
            )
            return f"{line}. Not measured: the units (wb.verify does)" if are_given else line
        worst = max(self.trials, key=lambda trial: trial.off)
        return (
            f"same update: {self.loop} weighs its micro-batches by their units, to within "
            f"{percent(worst.off)}, over {windows}"
        )

    def __str__(self) -> str:
        saw_nothing = self.watched is not None and not (
            self.watched.windows or self.watched.not_judged
        )
        return self.line if saw_nothing else super().__str__()

    @property
    def table(self) -> list[tuple[str, ...]]:
        """Return the head and the rows of the table of windows."""
        rows: list[tuple[str, ...]] = [("model", "window", "off by", "found")]
        before = ""
        for trial in self.trials:
            is_measured = math.isfinite(trial.off) and not trial.source.startswith("ledger")
            off = percent(trial.off) if is_measured else ""
            marks = {RIGHT: "✓ right", NOT_JUDGED: "? not judged", DIFFERENT: "✗ no known mistake"}
            result = f"✗ {trial.findings[0].name}" if trial.findings else marks[trial.answer]
            if trial.answer == RIGHT and trial.source.startswith("ledger"):
                result = "✓ by construction"
            case = "" if trial.case in (before, "live") else trial.case
            before = trial.case
            rows.append((case, trial.name, off, result))
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
        is_read = self.same and all(trial.source == "weights" for trial in self.trials)
        if is_read and units and all(math.isclose(min(u), max(u), rel_tol=1e-3) for u in units):
            notes[EQUAL_UNITS] = None
        of_watch = [*self.watched.notes]
        if self.watched.windows:
            about = {"averaged-per-micro-batch": "averages of the weights that are no copies"}
            open_ones = [text for key, text in about.items() if key not in self.mistakes]
            of_watch.append(f"not judged: {', '.join([*open_ones, 'the length of the schedule'])}")
        return [*notes, *self._places, *of_watch]

    @property
    def _places(self) -> list[str]:
        """Return where the loss, the backward and the step of a window stand that is not right."""
        places = next((t.lines for t in self.trials if t.answer != RIGHT and t.lines), {})
        listed = ", ".join(f"the {what} is at {line}" for what, line in places.items())
        return [listed] if listed else []

    def _instead(self, key: str) -> str:
        """Return what to do, in the trainer at hand."""
        trainer = "" if self.watched is None or key not in WEIGHED else self.watched.trainer
        return _IN_TRAINERS.get(trainer, MISTAKES[key].instead)
