"""`verify_loop`: compare your training loop with the undivided batch and every known mistake.

The loop gets copies of a model and its optimizer, and the micro-batches of one window. What it does
is recorded. It runs on several windows, because equal micro-batches hide a mean of means, and full
windows hide a nominal count.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch import to_device
from wholebatch.distributed.process_group import world_size
from wholebatch.errors import OptionError
from wholebatch.verification.example_models import ZOO, Case
from wholebatch.verification.loop_judge import LoopJudge
from wholebatch.verification.mistakes import (
    NOT_JUDGED,
    RIGHT,
    STEPPED_TWICE,
    MistakeFit,
    WindowParts,
    apart,
)
from wholebatch.verification.model_runs import AUTOCAST, DividedBatch, ModelRuns, Numbers, joined
from wholebatch.verification.observed_window import StartingState
from wholebatch.verification.random_numbers import SILENCES
from wholebatch.verification.run_comparison import TIMES_THE_FLOOR
from wholebatch.verification.verdicts import EQUAL_UNITS, LoopTrial, LoopVerdict
from wholebatch.verification.window_recorder import RecordedWindow, WindowRecorder

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
    for number, one in enumerate(map(_case, cases), start=1):
        _log.info("%d of %d: the loop on the model %s", number, len(cases), one.name)
        try:
            found = _CaseTrials(loop, one, steps, optimizer or _sgd, ddp, torch.device(device))
            trials += found.all(uneven=uneven)
            precision = found.numbers.precision if precision == "full" else precision
        except Exception as error:
            if case is not None or world_size() > 1:
                raise
            failed[one.name] = error
    if not trials:
        raise next(iter(failed.values()))
    left_out = tuple(
        f"not run on the built-in model {name!r}, where the loop raises {type(error).__name__}"
        for name, error in failed.items()
    )
    trials[0] = replace(trials[0], notes=(*trials[0].notes, *left_out))
    name = name or str(getattr(loop, "__name__", "the loop"))
    seconds = time.perf_counter() - began
    return LoopVerdict(name, tuple(_consistent(trials)), precision, world_size(), seconds)


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
    """One window that the loop has trained on one rank, taken apart."""

    windows: list[RecordedWindow]
    """One of each optimizer step."""
    moved: bool
    """True if the loop has changed the weights."""
    moved_beside: float
    """How far the weights have moved after the step, relative to the step's update."""
    keeps_gradients: bool
    """True if gradients are left behind."""
    skipped: bool
    """True if a loss scaler has skipped the only step."""
    stepped_twice: bool
    terms: list[dict[str, tuple[Tensor, float]]]
    """The gradient of each term's sum and its units, by name, of each micro-batch."""
    micros: list[Any]

    @property
    def means(self) -> list[Tensor]:
        """The gradient of each micro-batch's own mean."""
        return [_added(row, {n: units for n, (_, units) in row.items()}) for row in self.terms]

    @property
    def units(self) -> list[float]:
        """The units of each micro-batch, of its first term."""
        return [next(iter(row.values()))[1] for row in self.terms]


def _added(terms: Mapping[str, tuple[Tensor, float]], units: Mapping[str, float]) -> Tensor:
    """Return the gradients of the terms' sums, each divided by its units, added up."""
    parts = [gradient / (units.get(name) or 1.0) for name, (gradient, _) in terms.items()]
    return torch.stack(parts).sum(0)


def _units_of_all(rows: Iterable[Mapping[str, tuple[Tensor, float]]]) -> dict[str, float]:
    """Return the units of each term over all micro-batches."""
    totals: dict[str, float] = {}
    for row in rows:
        for name, (_, units) in row.items():
            totals[name] = totals.get(name, 0.0) + units
    return totals


@dataclass
class _CaseTrials:
    """One case: its model as it is at the start, and the windows that the loop is given."""

    loop: Loop
    case: Case
    steps: int
    make_optimizer: MakeOptimizer
    ddp: bool
    device: torch.device
    numbers: Numbers = field(default_factory=Numbers)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.case.model().to(self.device)
        self.rank = torch.distributed.get_rank() if world_size() > 1 else 0
        self._silence()

    def _silence(self) -> None:
        """Switch dropout off: its masks would rightly differ from those of the reference."""
        runs = ModelRuns(
            self.model, self.make_optimizer(self.model), self.case.loss, numbers=self.numbers
        )
        micro = self.case.window(self.steps, True, self.rank)[0]
        silences: list[Callable[[nn.Module], None]] = []
        if runs.draws_random_numbers(micro):
            runs.silences = [SILENCES[0]]
            silences = list(SILENCES[: 2 if runs.draws_random_numbers(micro) else 1])
            self.notes.append(
                "dropout is off: its masks depend on the split, which is not a mistake"
            )
        runs.start.leave()
        for silence in silences:
            silence(self.model)

    def all(self, *, uneven: bool) -> list[LoopTrial]:
        """Return the trials of full and short windows, with equal and uneven micro-batches."""
        shapes = [(even, n) for even in (True, False)[: 1 + uneven] for n in (0, 1)]
        trials = [self._trial(even, self.steps - less) for even, less in shapes]
        if self._left and world_size() == 1 and all(trial.found == RIGHT for trial in trials):
            trials += self._in_a_row(trials[0])
        return trials

    def _in_a_row(self, first: LoopTrial) -> list[LoopTrial]:
        """Give two windows in a row: gradients that were left behind are in the second."""
        micros = self.case.window(self.steps, True, self.rank)
        try:
            seen = self._recorded(micros, times=2)[0][0].windows
        except Exception:  # one that sets things up cannot be called again: not our matter
            return []
        if len(seen) < 2 or not seen[-1].backwards or not seen[-1].backwards[0].before.any():
            return []
        stale = MistakeFit("never-cleared", "two windows in a row")
        fits = (stale, replace(first.right, distance=1.0, fits=False))
        return [replace(first, name="2 windows in a row", found=stale.key, fits=fits)]

    # ---------------------------------------------------------------- one window

    def _trial(self, even: bool, count: int) -> LoopTrial:
        micros = self.case.window(self.steps, even, self.rank)[:count]
        ranks, floor, coupled = self._recorded(micros)
        units = [one.units for one in ranks]
        counts = {tuple(u for _, u in row.values()) for one in ranks for row in one.terms}
        kind = "equal" if len(counts) == 1 else "uneven"
        short = f" (short: {count} of {self.steps})" if count < self.steps else ""
        self._left = any(one.keeps_gradients for one in ranks)
        steps = {len(one.windows) for one in ranks}
        firsts = [one.windows[0] for one in ranks if one.windows]
        firsts = firsts or [RecordedWindow(0, 0, [], [], 2.0**-24, False)]
        name = f"{count} {kind} micro-batches{short}"
        judge = LoopJudge(firsts, name, self.steps, case=self.case.name)
        judge.notes, judge.units = list(self.notes), [unit for row in units for unit in row]
        if not even and kind == "equal" and count == self.steps:
            judge.notes.append(f"{self.case.name}: {EQUAL_UNITS}")
        trial = self._without_one_update(judge, ranks, steps)
        if trial is None:
            rows = [row for one in ranks for row in one.terms]
            total = _units_of_all(rows)
            summed = torch.stack([_added(row, total) for row in rows]).sum(0)
            parts = WindowParts(summed, [one.means for one in ranks], units, self.steps)
            inputs = [one.micros for one in ranks]
            trial = judge.trial_of(parts, floor, inputs, coupled=coupled)
        off = max(one.moved_beside for one in ranks)
        if trial.found == RIGHT and off:
            moved = MistakeFit("moved-beside-the-step", "the step and something else")
            right = MistakeFit(RIGHT, "the optimizer's step", off, False)
            trial = replace(trial, found=moved.key, fits=(moved, right), observed_by="updates")
        return replace(trial, name=name, optimizer_steps=max(steps))

    @staticmethod
    def _without_one_update(
        judge: LoopJudge, ranks: Sequence[_Recorded], steps: set[int]
    ) -> LoopTrial | None:
        """Return the verdict on a window with no step, with several, or with ranks that differ."""
        if any(one.skipped for one in ranks):
            return judge.not_judged(
                "the loss scaler skipped the step, because gradients were not finite: let it begin "
                "at a smaller scale, such as GradScaler(init_scale=64.0)"
            )
        if steps == {0} and not any(one.moved for one in ranks):
            return judge.told(MistakeFit("no-update", "no optimizer step"))
        if len(steps) > 1:
            variant = "another number of steps on each rank"
            return judge.told(MistakeFit("unsynchronised-ranks", variant))
        if steps == {0}:
            return judge.not_judged(
                "the weights have changed without a step of a torch optimizer: use the optimizer "
                "that the loop gets"
            )
        if any(one.stepped_twice for one in ranks):
            return judge.told(MistakeFit(*STEPPED_TWICE))
        if any(len({window.optimizer for window in one.windows}) > 1 for one in ranks):
            return judge.not_judged(
                "several optimizers step on parts of the model: use wb.watch, which judges each"
            )
        if max(steps) > 1:
            variant = f"{max(steps)} steps in the window"
            return judge.told(MistakeFit("stepped-every-micro-batch", variant))
        return None

    def _recorded(
        self, micros: Sequence[Any], times: int = 1
    ) -> tuple[list[_Recorded], float, bool]:
        """Let the loop train on copies of the model and the optimizer, and take its window apart.

        Return what every rank has recorded, the rounding of the right gradient, and True if the
        undivided batch is further from its micro-batches than that.
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
        update = recorder.sample(start.update(recorder.parameters))
        beside = 0.0
        if recorder.after_step is not None and recorder.after_step.numel():
            moved = recorder.sample(recorder.parameters) - recorder.after_step
            beside = float(moved.norm() / (update - moved).norm().clamp_min(1e-30))
        if recorder.autocast and self.numbers.precision == "full":
            names = {dtype: name for name, dtype in AUTOCAST.items()}
            name = names.get(next(iter(recorder.autocast)), "full")
            self.numbers = Numbers(name, 1024.0 if name == "fp16" else 1.0)
        own = copy.deepcopy(self.model)
        runs = ModelRuns(own, self.make_optimizer(own), self.case.loss, numbers=self.numbers)
        terms, off, floor = self._parts(runs, recorder, micros)
        mine = _Recorded(
            windows=recorder.windows,
            moved=bool(update.any()),
            moved_beside=beside,
            keeps_gradients=any(
                p.grad is not None and bool(p.grad.any()) for p in model.parameters()
            ),
            skipped=recorder.overflowed and not recorder.windows,
            stepped_twice=recorder.stepped_twice,
            terms=terms,
            micros=list(micros),
        )
        limit = math.sqrt(runs.unit) / TIMES_THE_FLOOR
        if world_size() == 1:
            return [mine], min(max(floor, 0.0 if off > limit else off), limit), off > limit
        gathered: list[Any] = [None] * world_size()
        torch.distributed.all_gather_object(gathered, (mine, off, floor))
        off, floor = max(one[1] for one in gathered), max(one[2] for one in gathered)
        floor = min(max(floor, 0.0 if off > limit else off), limit)
        return [one[0] for one in gathered], floor, off > limit

    def _parts(
        self, runs: ModelRuns, recorder: WindowRecorder, micros: Sequence[Any]
    ) -> tuple[list[dict[str, tuple[Tensor, float]]], float, float]:
        """Return the gradient and the units of each term, of each micro-batch.

        Also how far the undivided batch is from their sum, and from itself in another order.
        """

        def terms_of(batch: Any) -> dict[str, tuple[Tensor, float]]:
            return {
                name: (
                    recorder.sample_of_step(dict(zip(runs.names, term.gradient, strict=True))),
                    term.units,
                )
                for name, term in runs.gradients_of_terms(batch).items()
            }

        terms = [terms_of(micro) for micro in micros]
        whole = joined(micros)
        if whole is None:
            return terms, 0.0, runs.unit
        total = _units_of_all(terms)
        added = torch.stack([_added(row, total) for row in terms]).sum(0)
        right = _added(terms_of(whole), total)
        again = _added(terms_of(DividedBatch(whole).in_other_orders()[0][0]), total)
        return terms, apart(added, right), max(runs.unit, apart(again, right))


def _consistent(trials: Sequence[LoopTrial]) -> list[LoopTrial]:
    """Name the mistake that agrees most with the other windows, where several fit one.

    A window that is right speaks against every mistake that would have shown in it.
    """
    votes: dict[str, int] = {}
    for trial in trials:
        for fit in trial.fits:
            agrees = 1 if fit.fits else -1 if trial.found == RIGHT else 0
            votes[fit.key] = votes.get(fit.key, 0) + agrees
    result = []
    for trial in trials:
        known = (RIGHT, NOT_JUDGED, "coupled", "moved-beside-the-step", None)
        if trial.found not in known:
            fitting = [fit for fit in trial.fits if fit.fits and fit.key != RIGHT]
            best = max(fitting, key=lambda fit: (votes[fit.key], -fit.distance))
            trial = replace(trial, found=best.key)
        result.append(trial)
    return result
