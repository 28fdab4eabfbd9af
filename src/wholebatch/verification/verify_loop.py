"""`verify_loop`: your own training loop, compared with the undivided batch and every known mistake.

The loop is given copies of a model and its optimizer and the micro-batches of one window, and is
watched: what each optimizer step saw, how clipping was called, under which autocast the model ran.
It gets several windows, since mistakes hide: behind equal micro-batches (a mean of means), behind
full windows (a nominal count), behind clipping (a wrong scale) and behind Adam (any scale at all).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.splitting import to_device
from wholebatch.distributed.process_group import world_size
from wholebatch.errors import OptionError
from wholebatch.verification.example_models import ZOO, Case
from wholebatch.verification.mistakes import (
    RIGHT,
    MistakeFit,
    always_active,
    apart,
    fits_of,
    flat,
    parts_of,
    wrong_update,
)
from wholebatch.verification.model_runs import ModelRuns
from wholebatch.verification.observed_window import StartingState, WindowObserver, WindowRun
from wholebatch.verification.random_numbers import SILENCES
from wholebatch.verification.undivided_batch import AUTOCAST, Numbers
from wholebatch.verification.verdicts import LoopTrial, LoopVerdict

Loop = Callable[[Any, Any, Any], object]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

_NO_LIMIT = 1e30
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
    return LoopVerdict(
        loop=name or str(getattr(loop, "__name__", "the loop")),
        trials=tuple(_consistent(trials)),
        precision=precision,
        ranks=world_size(),
        seconds=time.perf_counter() - began,
    )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _case(case: Case | str) -> Case:
    if isinstance(case, Case):
        return case
    if case not in ZOO:
        raise OptionError(f"case={case!r}: must be one of {', '.join(ZOO)}, or a Case of your own")
    return ZOO[case]


@dataclass(frozen=True)
class _Window:
    even: bool
    count: int
    clipped: str = ""  # by its "norm", by its "value"

    def name(self, units: Sequence[float], steps: int) -> str:
        """Return the kind of window, by the units that its micro-batches turned out to have."""
        kind = "equal" if len(set(units)) == 1 else "uneven"
        short = f" (short: {self.count} of {steps})" if self.count < steps else ""
        clipped = f", clipped by {self.clipped}" if self.clipped else ""
        return f"{self.count} {kind} micro-batches{short}{clipped}"


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
        full, short = self.steps, self.steps - 1
        trials: list[LoopTrial] = []
        clips: set[str] = set()
        for even in (True, False) if uneven else (True,):
            for count in (full, short):
                trial, observer = self._trial(_Window(even, count))
                trials.append(trial)
                clips |= observer.clips
        trials += [self._trial(_Window(True, full, clipped=how))[0] for how in sorted(clips)]
        if world_size() == 1 and all(trial.found == RIGHT for trial in trials):
            trials += self._in_a_row(trials[0])
        return trials

    def _in_a_row(self, first: LoopTrial) -> list[LoopTrial]:
        """Give the same window twice, from the same weights, if gradients are left behind.

        A right loop sees the same gradient again; with the first window's still there, twice that.
        """
        micros = self.case.window(self.steps, True, self.rank)
        model = copy.deepcopy(self.model)
        optimizer = self.make_optimizer(model)
        start = StartingState(model, optimizer)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        seen: list[Tensor] = []
        for _ in range(2):
            with WindowObserver(model, trained, clip_to=_NO_LIMIT) as observer:
                try:
                    self.loop(model, optimizer, self._copies(micros))
                except Exception:  # one that sets things up cannot be called again: not our matter
                    return []
            left = [(one, one.grad) for one in model.parameters()]
            held = [gradient for _, gradient in left if gradient is not None]
            if len(observer.steps) != 1 or not any(
                bool(one.detach().abs().sum() > 0) for one in held
            ):
                return []
            seen.append(flat(observer.steps[0].gradients, trained))
            start.restore()
            for parameter, gradient in left:
                parameter.grad = gradient
        far, doubled = apart(seen[1], seen[0]), apart(seen[1], 2 * seen[0])
        if far <= first.tolerance or doubled > first.tolerance:
            return []
        stale = MistakeFit("never-cleared", "the same window twice in a row", doubled, True)
        right = MistakeFit(RIGHT, "the undivided batch", far, False)
        return [replace(first, name="2 windows in a row", found=stale.key, fits=(stale, right))]

    # ---------------------------------------------------------------- one window

    def _trial(self, window: _Window) -> tuple[LoopTrial, WindowObserver]:
        micros = self.case.window(self.steps, window.even, self.rank)[: window.count]
        limits: dict[str, float] = {}
        if by := window.clipped:
            limits[by] = always_active(
                parts_of(self._model_runs(), micros, steps=self.steps)[0], by
            )
        run, observer = self._observed(micros, limits)
        if observer.autocast and self.numbers.precision == "full":
            names = {dtype: name for name, dtype in AUTOCAST.items()}
            name = names.get(next(iter(observer.autocast)), "full")
            self.numbers = Numbers(name, 1024.0 if name == "fp16" else 1.0)
        runs = self._model_runs()
        norm, value = limits.get("norm", self.clip_norm), limits.get("value")
        parts, floor = parts_of(runs, micros, steps=self.steps, clip_norm=norm, clip_value=value)
        fits, observed_by, tolerance = fits_of(runs, parts, run, micros, floor)
        notes = list(self.notes)
        found = _found(fits)
        is_right = found == RIGHT and observed_by == "gradients"
        if is_right and (wrong := wrong_update(runs, run, observer.settings)):
            fits, found, observed_by = wrong, wrong[0].key, "updates"
        if not window.even and len(set(parts.units)) == 1 and len(micros) > 1:
            notes.append(
                f"{self.case.name}: all micro-batches have equally many units, so a mean of means "
                "cannot be told from the mean here"
            )
        if observer.scaler_steps and not run.steps:
            notes.append("the loss scaler skipped the step: its gradients were not finite")
        trial = LoopTrial(
            case=self.case.name,
            name=window.name(parts.units, self.steps),
            micro_batches=len(micros),
            units=tuple(parts.units),
            optimizer_steps=len(run.steps),
            found=found,
            fits=tuple(fits),
            tolerance=tolerance,
            floor=floor,
            observed_by=observed_by,
            notes=tuple(notes),
        )
        return trial, observer

    def _model_runs(self) -> ModelRuns:
        model = copy.deepcopy(self.model)
        return ModelRuns(model, self.make_optimizer(model), self.case.loss, numbers=self.numbers)

    def _observed(
        self, micros: Sequence[Any], limits: dict[str, float]
    ) -> tuple[WindowRun, WindowObserver]:
        """Let the loop train one window on copies; again, if its loss scaler skips the step."""
        run, observer = self._once(micros, limits)
        if observer.scaler_steps and not run.steps:
            with _low_loss_scale():
                run, observer = self._once(micros, limits)
        return run, observer

    def _once(
        self, micros: Sequence[Any], limits: dict[str, float]
    ) -> tuple[WindowRun, WindowObserver]:
        model = copy.deepcopy(self.model)
        optimizer = self.make_optimizer(model)
        start = StartingState(model, optimizer)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        handed: nn.Module = model
        if self.ddp and world_size() > 1:
            handed = nn.parallel.DistributedDataParallel(model)
        norm, value = limits.get("norm", _NO_LIMIT), limits.get("value", math.inf)
        with WindowObserver(model, trained, norm, value, optimizer) as observer:
            self.loop(handed, optimizer, self._copies(micros))
            return observer.run(start), observer

    def _copies(self, micros: Sequence[Any]) -> list[Any]:
        return [to_device(micro, self.device) for micro in copy.deepcopy(list(micros))]


def _found(fits: Sequence[MistakeFit]) -> str | None:
    right = next((fit for fit in fits if fit.key == RIGHT), None)
    if right is not None and right.fits:
        return RIGHT
    # The loop weighs its micro-batches rightly: what is wrong lies in the model.
    if any(fit.key == "coupled" and fit.fits for fit in fits):
        return "coupled"
    return fits[0].key if fits[0].fits else None


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
        if trial.found not in (RIGHT, "coupled", None):
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

    setattr(torch.amp.GradScaler, "__init__", low)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.amp.GradScaler, "__init__", original)  # noqa: B010
