"""`verify_loop`: compare your training loop with the undivided batch and every known mistake.

The loop gets copies of a model and its optimizer, and the micro-batches of one window. What it does
is recorded. It runs on several windows, because equal micro-batches hide a mean of means, and full
windows hide a nominal count.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from wholebatch.batch import to_device
from wholebatch.distributed.process_group import of_all_ranks, world_size
from wholebatch.errors import OptionError
from wholebatch.readable_sizes import percent
from wholebatch.verification.divided_batch import counts_of, other_counts
from wholebatch.verification.evidence import Counts, KnownTerms, WindowEvidence
from wholebatch.verification.example_models import ZOO, Case
from wholebatch.verification.findings import STEPPED_TWICE, Finding
from wholebatch.verification.judge import judge
from wholebatch.verification.known_terms import known_terms
from wholebatch.verification.model_runs import AUTOCAST, ModelRuns
from wholebatch.verification.random_numbers import silenced
from wholebatch.verification.starting_state import StartingState
from wholebatch.verification.verdicts import (
    DIFFERENT,
    EQUAL_UNITS,
    NOT_JUDGED,
    RIGHT,
    LoopTrial,
    LoopVerdict,
    consistent,
)
from wholebatch.verification.window_recorder import WindowRecorder

Loop = Callable[[Any, Any, Any], object]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

_log = logging.getLogger("wholebatch.verify")


def verify_loop(
    loop: Loop,
    *,
    case: Case | str | Sequence[Case | str] | None = None,
    steps: int = 4,
    optimizer: MakeOptimizer | None = None,
    uneven: bool = True,
    ddp: bool = False,
    device: torch.device | str = "cpu",
    name: str | None = None,
) -> LoopVerdict:
    """Return a verdict: does `loop(model, optimizer, micro_batches)` make the right update?

    Right is the update of the undivided batch.

    >>> import torch
    >>> def loop(model, optimizer, micro_batches):                     # a mean of means
    ...     for micro in micro_batches:
    ...         logits = model(micro["x"]).flatten(0, -2)
    ...         loss = torch.nn.functional.cross_entropy(logits, micro["y"].flatten())
    ...         (loss / len(micro_batches)).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> verify_loop(loop, case="mlp").mistakes
    ('mean-of-means',)

    `case` is a model with micro-batches: built-in ones by name ("mlp", "lm"), or a `Case`.
    By default all built-in ones are tried, and those on which the loop fails are left out.
    `steps` is the number of micro-batches in a full window; a short window is tried too.
    `uneven=False` tries only micro-batches with the same number of units. `optimizer(model)`
    creates the optimizer (default: SGD). Clipping with torch's functions is recorded. On several
    ranks, the loop gets the plain model and wraps it, or with `ddp=True` the model in
    DistributedDataParallel; every rank has its own micro-batches.
    """
    began = time.perf_counter()
    if not callable(loop):
        raise OptionError(f"loop={loop!r}: must be a function of (model, optimizer, micro_batches)")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise OptionError(f"steps={steps!r}: must be a number of micro-batches, at least 2")
    trials: list[LoopTrial] = []
    precision, failed = "full", dict[str, Exception]()
    cases = tuple(ZOO) if case is None else (case,) if isinstance(case, str | Case) else case
    for number, tried in enumerate(map(_case, cases), start=1):
        _log.info("%d of %d: the loop on the model %s", number, len(cases), tried.name)
        try:
            runs = _CaseTrials(loop, tried, steps, optimizer or _sgd, ddp, torch.device(device))
            trials += runs.all(uneven=uneven)
            precision = runs.precision if precision == "full" else precision
        except Exception as error:
            if case is not None or world_size() > 1:
                raise
            failed[tried.name] = error
    if not trials:
        raise next(iter(failed.values()))
    left_out = tuple(
        f"not run on the built-in model {name!r}, where the loop raises {type(error).__name__}"
        for name, error in failed.items()
    )
    trials[0] = replace(trials[0], notes=(*trials[0].notes, *left_out))
    name = name or str(getattr(loop, "__name__", "the loop"))
    seconds = time.perf_counter() - began
    return LoopVerdict(name, consistent(trials), precision, world_size(), seconds)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _case(case: Case | str) -> Case:
    if isinstance(case, Case):
        return case
    if case not in ZOO:
        raise OptionError(f"case={case!r}: must be one of {', '.join(ZOO)}, or a Case of your own")
    return ZOO[case]


@dataclass(frozen=True)
class _Recorded:
    """What the loop has done with one window on one rank."""

    windows: list[WindowEvidence]
    """One of each optimizer step."""
    known: KnownTerms
    moved: bool
    """True if the loop has changed the weights."""
    moved_beside: float
    """How far the weights have moved after the step, relative to the step's update."""
    keeps_gradients: bool
    """True if gradients are left behind."""
    skipped: bool
    """True if a loss scaler has skipped the only step."""
    stepped_twice: bool


@dataclass
class _CaseTrials:
    """One case: its model as it is at the start, and the windows that the loop is given."""

    loop: Loop
    case: Case
    steps: int
    make_optimizer: MakeOptimizer
    ddp: bool
    device: torch.device
    precision: str = "full"
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.case.model().to(self.device)
        self.rank = torch.distributed.get_rank() if world_size() > 1 else 0
        self.drawn = self._silence()

    def _silence(self) -> str:
        """Switch dropout off: its masks would rightly differ from those of the reference.

        Return what draws random numbers all the same.
        """
        runs = ModelRuns(self.model, self.make_optimizer(self.model), self.case.loss)
        note, drawn = silenced(runs, self.case.window(self.steps, True, self.rank)[0])
        runs.start.leave()
        for silence in runs.silences:
            silence(self.model)
        self.notes += filter(None, [note])
        return drawn

    def all(self, *, uneven: bool) -> list[LoopTrial]:
        """Return the trials of full and short windows, with equal and uneven micro-batches."""
        shapes = [(even, n) for even in (True, False)[: 1 + uneven] for n in (0, 1)]
        trials = [self._trial(even, self.steps - less) for even, less in shapes]
        if self._left and world_size() == 1 and all(trial.answer == RIGHT for trial in trials):
            trials += self._in_a_row(trials[0])
        return trials

    def _in_a_row(self, first: LoopTrial) -> list[LoopTrial]:
        """Give two windows in a row: gradients that were left behind are in the second."""
        micros = self.case.window(self.steps, True, self.rank)
        try:
            windows = self._recorded(micros, times=2)[0].windows
        except Exception:  # one that sets things up cannot be called again: not our matter
            return []
        if len(windows) < 2 or not windows[-1].backwards:
            return []
        if not windows[-1].backwards[0].before.any():
            return []
        stale = Finding("never-cleared", "two windows in a row")
        return [replace(first, name="2 windows in a row", answer=DIFFERENT, findings=(stale,))]

    # ---------------------------------------------------------------- one window

    def _trial(self, even: bool, count: int) -> LoopTrial:
        micros = self.case.window(self.steps, even, self.rank)[:count]
        ranks = self._recorded(micros)
        units = [dict(rank.known.units) for rank in ranks]
        is_equal = len({row for terms in units for row in zip(*terms.values(), strict=True)}) == 1
        kind = "equal" if is_equal else "uneven"
        short = f" (short: {count} of {self.steps})" if count < self.steps else ""
        self._left = any(rank.keeps_gradients for rank in ranks)
        name, notes = f"{count} {kind} micro-batches{short}", list(self.notes)
        if not even and is_equal and count == self.steps:
            notes.append(f"{self.case.name}: {EQUAL_UNITS}")
        steps = {len(rank.windows) for rank in ranks}
        trial = LoopTrial(name, self.case.name, micro_batches=count, notes=tuple(notes))
        ended = _without_one_update(ranks, steps)
        if isinstance(ended, Finding):
            trial = trial.with_answer(DIFFERENT, findings=[ended])
        elif ended or self.drawn:
            reason = ended or f"{self.drawn}, so that no window can be compared"
            trial = trial.with_answer(NOT_JUDGED, reason)
        else:
            windows = [replace(rank.windows[0], known=rank.known) for rank in ranks]
            counted = [list(next(iter(terms.values()))) for terms in units]
            others = other_counts(
                [list(map(counts_of, rank.known.micro_batches)) for rank in ranks]
            )
            counts = Counts(
                micro_batches=count,
                usual=self.steps,
                ranks=len(ranks),
                others={name: row for name, row in others.items() if row != counted},
            )
            trial = judge(windows, counts, name, case=self.case.name, notes=notes)
        off = max(rank.moved_beside for rank in ranks)
        if trial.answer == RIGHT and off:
            moved = Finding("moved-beside-the-step", f"{percent(off)} of the update")
            trial = replace(trial, answer=DIFFERENT, findings=(moved,), off=off)
        return replace(trial, optimizer_steps=max(steps))

    def _recorded(self, micros: Sequence[Any], times: int = 1) -> list[_Recorded]:
        """Let the loop train on copies of the model and the optimizer; return what it did.

        On several ranks, what each of them did.
        """
        model = copy.deepcopy(self.model)
        optimizer = self.make_optimizer(model)
        start = StartingState(model, optimizer)
        handed: nn.Module = model
        if self.ddp and world_size() > 1:
            handed = nn.parallel.DistributedDataParallel(model)
        recorder = WindowRecorder(model, optimizer)
        with recorder:
            for _ in range(times):
                copies = [to_device(micro, self.device) for micro in copy.deepcopy(list(micros))]
                self.loop(handed, optimizer, copies)
        rows = recorder.rows
        update = rows.sample(start.update(rows.parameters))
        beside = 0.0
        if recorder.after_step is not None and recorder.after_step.numel():
            moved = rows.weights() - recorder.after_step
            beside = float(moved.norm() / (update - moved).norm().clamp_min(1e-30))
        if recorder.autocast and self.precision == "full":
            names = {dtype: name for name, dtype in AUTOCAST.items()}
            self.precision = names.get(next(iter(recorder.autocast)), "full")
        own = copy.deepcopy(self.model)
        scale = 1024.0 if self.precision == "fp16" else 1.0
        runs = ModelRuns(own, self.make_optimizer(own), self.case.loss, self.precision, scale)
        indices = recorder.windows[0].indices if recorder.windows else ()
        recorded = _Recorded(
            windows=recorder.windows,
            known=known_terms(runs, rows, indices, micros),
            moved=bool(update.any()),
            moved_beside=beside,
            keeps_gradients=any(
                p.grad is not None and bool(p.grad.any()) for p in model.parameters()
            ),
            skipped=recorder.overflowed and not recorder.windows,
            stepped_twice=recorder.stepped_twice,
        )
        return of_all_ranks(recorded)


def _without_one_update(ranks: Sequence[_Recorded], steps: set[int]) -> Finding | str:
    """Return what is wrong with a window of no step, of several, or of ranks that differ."""
    if any(rank.skipped for rank in ranks):
        return (
            "the loss scaler skipped the step, because gradients were not finite: let it begin at "
            "a smaller scale, such as GradScaler(init_scale=64.0)"
        )
    if steps == {0} and not any(rank.moved for rank in ranks):
        return Finding("no-update", "no optimizer step")
    if len(steps) > 1:
        return Finding("unsynchronised-ranks", "another number of steps on each rank")
    if steps == {0}:
        return (
            "the weights have changed without a step of a torch optimizer: use the optimizer that "
            "the loop gets"
        )
    if any(rank.stepped_twice for rank in ranks):
        return STEPPED_TWICE
    if any(len({window.optimizer for window in rank.windows}) > 1 for rank in ranks):
        return "several optimizers step on parts of the model: use wb.watch, which judges each"
    if max(steps) > 1:
        return Finding("stepped-every-micro-batch", f"{max(steps)} steps in the window")
    return ""
