"""`verify_loop`: your own training loop, compared with the undivided batch and every known mistake.

The loop is given copies of a model and its optimizer and the micro-batches of one window, and is
recorded. It gets several windows, since mistakes hide: behind equal micro-batches (a mean of means)
and behind full windows (a nominal count).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from wholebatch.batch import to_device
from wholebatch.distributed.process_group import largest_over_ranks, sum_over_ranks, world_size
from wholebatch.errors import OptionError
from wholebatch.verification.example_models import ZOO, Case
from wholebatch.verification.loop_judge import EQUAL_UNITS, LoopJudge
from wholebatch.verification.mistakes import RIGHT, STEPPED_TWICE, MistakeFit, WindowParts, apart
from wholebatch.verification.model_runs import AUTOCAST, DividedBatch, ModelRuns, Numbers, joined
from wholebatch.verification.observed_window import StartingState
from wholebatch.verification.random_numbers import SILENCES
from wholebatch.verification.run_comparison import TIMES_THE_FLOOR
from wholebatch.verification.verdicts import LoopTrial, LoopVerdict
from wholebatch.verification.window_recorder import RecordedWindow, WindowRecorder

Loop = Callable[[Any, Any, Any], object]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

_LOW_SCALE = 2.0**6


def verify_loop(
    loop: Loop,
    *,
    case: Case | str | Sequence[Case | str] = ("mlp", "lm", "cnn"),
    steps: int = 4,
    optimizer: MakeOptimizer | None = None,
    clip_norm: float | None = None,
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

    `case` is a model with micro-batches: built-in ones by name ("mlp", "lm", "cnn"), or a `Case`.
    `steps` is the number of micro-batches that the loop calls a full window; it is also given a
    short one. `uneven=False` says that all micro-batches always have equally many units, and
    leaves the windows out in which they do not. `optimizer(model)` makes the optimizer (default:
    SGD). Clipping through torch's functions is noticed; a loop that clips by hand is told so with
    `clip_norm`. Under several ranks the model is handed over plain, for the loop to wrap, or in
    DistributedDataParallel with `ddp=True`; every rank has micro-batches of its own.
    """
    began = time.perf_counter()
    if not callable(loop):
        raise OptionError(f"loop={loop!r}: must be a function of (model, optimizer, micro_batches)")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise OptionError(f"steps={steps!r}: must be a number of micro-batches, at least 2")
    trials: list[LoopTrial] = []
    precision = "full"
    for one in [case] if isinstance(case, str | Case) else case:
        found = _CaseTrials(
            loop, _case(one), steps, optimizer or _sgd, clip_norm, ddp, torch.device(device)
        )
        trials += found.all(uneven=uneven)
        precision = found.numbers.precision if precision == "full" else precision
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
    """One window that the loop has trained: what was seen of it, and the update it made."""

    recorder: WindowRecorder
    windows: Sequence[RecordedWindow]
    update: Tensor
    keeps_gradients: bool
    """True if gradients are left behind."""

    @property
    def beside(self) -> float:
        """Return how far the weights have moved after the step, relative to the step's update."""
        recorder = self.recorder
        if recorder.after_step is None or not recorder.after_step.numel():
            return 0.0
        moved = recorder.row_of(list(recorder.parameters)) - recorder.after_step
        return float(moved.norm() / (self.update - moved).norm().clamp_min(1e-30))


@dataclass
class _CaseTrials:
    """One case: its model as it is at the start, and the windows that the loop is given."""

    loop: Loop
    case: Case
    steps: int
    make_optimizer: MakeOptimizer
    clip_norm: float | None
    ddp: bool
    device: torch.device
    numbers: Numbers = field(default_factory=Numbers)
    notes: list[str] = field(default_factory=list)
    looks: bool = True

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
            self.notes.append("dropout is off: its masks differ with the division, rightly so")
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
            seen = self._recorded(micros, times=2).windows
        except Exception:  # one that sets things up cannot be called again: not our matter
            return []
        if len(seen) < 2 or not seen[-1].micros[0].before.any():
            return []
        stale = MistakeFit("never-cleared", "two windows in a row")
        fits = (stale, replace(first.right, distance=1.0, fits=False))
        return [replace(first, name="2 windows in a row", found=stale.key, fits=fits)]

    # ---------------------------------------------------------------- one window

    def _trial(self, even: bool, count: int) -> LoopTrial:
        micros = self.case.window(self.steps, even, self.rank)[:count]
        seen = self._recorded(micros)
        recorder, notes = seen.recorder, list(self.notes)
        if recorder.skipped_steps and not recorder.steps:
            with _low_loss_scale():
                seen = self._recorded(micros)
                recorder = seen.recorder
            if recorder.skipped_steps and not recorder.steps:
                notes.append("the loss scaler skipped the step: its gradients were not finite")
        self._left = seen.keeps_gradients
        if recorder.autocast and self.numbers.precision == "full":
            names = {dtype: name for name, dtype in AUTOCAST.items()}
            name = names.get(next(iter(recorder.autocast)), "full")
            self.numbers = Numbers(name, 1024.0 if name == "fp16" else 1.0)
        model = copy.deepcopy(self.model)
        runs = ModelRuns(model, self.make_optimizer(model), self.case.loss, numbers=self.numbers)
        parts, floor, coupled = self._parts(runs, recorder, micros)
        kind = "equal" if len(set(parts.units)) == 1 else "uneven"
        short = f" (short: {count} of {self.steps})" if count < self.steps else ""
        if not even and kind == "equal" and count > 1:
            notes.append(f"{self.case.name}: {EQUAL_UNITS}")
        made = recorder.updates()
        window = seen.windows[0] if seen.windows else recorder.window or recorder.new_window()
        judge = LoopJudge(window, recorder, f"{count} {kind} micro-batches{short}", self.case.name)
        judge.notes, judge.optimizer_steps, judge.units = notes, len(made), parts.units
        if (told := _without_one_update(seen, len(made))) is not None:
            return judge.told(*told)
        judge.window.gradient = made[0] if made else seen.update
        if not made:  # an engine of its own stepped: what is left to see is the update
            judge.by = "updates"
            judge.as_seen = lambda gradient: _stepped(runs, recorder, gradient)
            floor += _rounded_away(runs, recorder, seen.update) / TIMES_THE_FLOOR
        elif self.clip_norm is not None:
            judge.as_seen = self._clipped  # with torch's 1e-6 beside the norm, or without it
            floor += 1e-6 / (TIMES_THE_FLOOR * float(parts.right.norm()))
        trial = judge.trial_of(parts, floor, micros, coupled=coupled)
        if trial.found == RIGHT and made and (off := largest_over_ranks(seen.beside)):
            moved = MistakeFit("moved-beside-the-step", "the step and something else")
            right = MistakeFit(RIGHT, "the optimizer's step", off, False)
            trial = replace(trial, found=moved.key, fits=(moved, right), observed_by="updates")
        return trial

    def _clipped(self, gradient: Tensor) -> Tensor:
        """Return a gradient as the loop clips it by hand."""
        assert self.clip_norm is not None
        return gradient * min(1.0, self.clip_norm / max(float(gradient.norm()), 1e-30))

    def _parts(
        self, runs: ModelRuns, recorder: WindowRecorder, micros: Sequence[Any]
    ) -> tuple[WindowParts, float, bool]:
        """Take a window apart; return also the rounding of its right gradient, and if it couples.

        It couples samples if the undivided batch is further from its micro-batches than rounding.
        """
        means, units = [], []
        for micro in micros:
            gradient, counted = runs.gradient_of(micro)
            means.append(recorder.row_of(gradient) / (counted[0] or 1.0))
            units.append(counted[0])
        parts = WindowParts(torch.zeros_like(means[0]), means, units, self.steps)
        everywhere = parts.units_everywhere
        right, floor = sum_over_ranks(parts.weighted(units)) / everywhere, runs.unit
        limit, whole = math.sqrt(runs.unit) / TIMES_THE_FLOOR, joined(micros)
        if whole is None:
            return replace(parts, right=right), min(floor, limit), False

        def undivided(batch: Any, order: Sequence[int] | None = None) -> Tensor:
            row = recorder.row_of(runs.gradient_of(batch, order)[0])
            return sum_over_ranks(row) / everywhere

        added, right = right, undivided(whole)
        off = apart(added, right)
        floor = max(floor, apart(undivided(*DividedBatch(whole).in_other_orders()[0]), right))
        if coupled := off > limit:  # no rounding is so large
            right = added
        else:
            floor = max(floor, off)
        return replace(parts, right=right), min(floor, limit), coupled

    def _recorded(self, micros: Sequence[Any], times: int = 1) -> _Recorded:
        """Let the loop train windows on copies of the model and the optimizer."""
        model = copy.deepcopy(self.model)
        optimizer = self.make_optimizer(model)
        start = StartingState(model, optimizer)
        handed: nn.Module = model
        if self.ddp and world_size() > 1:
            handed = nn.parallel.DistributedDataParallel(model)
        windows: list[RecordedWindow] = []
        recorder = WindowRecorder(model, optimizer, windows.append, looks=self.looks)
        if self.clip_norm is not None:  # the norm is that of all numbers
            recorder.numbers = sum(parameter.numel() for parameter in model.parameters())
        with recorder:
            for _ in range(times):
                copies = [to_device(micro, self.device) for micro in copy.deepcopy(list(micros))]
                self.loop(handed, optimizer, copies)
        self.looks = False
        update = recorder.row_of(start.update(recorder.parameters))
        left = any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
        return _Recorded(recorder, windows, update, left)


def _without_one_update(seen: _Recorded, steps: int) -> tuple[str, str] | None:
    """Return the mistake of a window with no step, with several, or with others on the ranks."""
    if not largest_over_ranks(steps > 0 or bool(seen.update.any())):
        return "no-update", "no optimizer step"
    if largest_over_ranks(steps) != -largest_over_ranks(-steps):
        return "unsynchronised-ranks", "another number of steps on each rank"
    if seen.recorder.stepped_twice:
        return STEPPED_TWICE
    if steps > 1:
        return "stepped-every-micro-batch", f"{steps} steps in the window"
    return None


def _stepped(runs: ModelRuns, recorder: WindowRecorder, row: Tensor) -> Tensor:
    """Return the update that the optimizer makes of a gradient."""
    runs.begin()
    recorder.spread(row, runs.parameters)
    runs.optimizer.step()
    return recorder.row_of(runs.start.update(runs.parameters))


def _rounded_away(runs: ModelRuns, recorder: WindowRecorder, update: Tensor) -> float:
    """Return the share of an update that adding it to the parameters rounds away."""
    weights = recorder.row_of([runs.start.before(p) for p in runs.parameters])
    return TIMES_THE_FLOOR * 6e-8 * float(weights.norm()) / max(float(update.norm()), 1e-30)


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
        if trial.found not in (RIGHT, "coupled", "moved-beside-the-step", None):
            fitting = [fit for fit in trial.fits if fit.fits and fit.key != RIGHT]
            best = max(fitting, key=lambda fit: (votes[fit.key], -fit.distance))
            trial = replace(trial, found=best.key)
        result.append(trial)
    return result


@contextmanager
def _low_loss_scale() -> Iterator[None]:
    """Let every new GradScaler begin at 64 or lower instead of 65536: its first step is no skip."""
    original = torch.amp.GradScaler.__init__

    def low(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_enabled():
            self._init_scale = min(self._init_scale, _LOW_SCALE)

    with patch.object(torch.amp.GradScaler, "__init__", low):
        yield
