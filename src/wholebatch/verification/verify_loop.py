"""`verify_loop`: someone's own training loop, held against the undivided batch and every mistake.

The loop is given copies of a model and its optimizer and the micro-batches of one window, and is
watched: what each optimizer step saw, how clipping was called, under which autocast the model ran.
It gets several windows, since mistakes hide: behind equal micro-batches (a mean of means), behind
full windows (a nominal count), behind clipping (a wrong scale) and behind Adam (any scale at all).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.splitting import to_device
from wholebatch.errors import OptionError
from wholebatch.verification.example_models import ZOO, Case
from wholebatch.verification.mistakes import (
    RIGHT,
    Fit,
    always_active,
    fits_of,
    flat,
    moved_otherwise,
    parts_of,
)
from wholebatch.verification.model_runs import Bench
from wholebatch.verification.observed_window import Run, Start, Watch
from wholebatch.verification.random_numbers import SILENCES
from wholebatch.verification.undivided_batch import Numbers, apart, ranks
from wholebatch.verification.verdicts import LoopVerdict, Trial

__all__ = ["Loop", "gentle_loss_scale", "verify_loop"]


Loop = Callable[[Any, Any, Any], object]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_NO_LIMIT = 1e30


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
    """Whether `loop(model, optimizer, micro_batches)` makes the update of the undivided batch.

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
    cases = [case] if isinstance(case, str | Case) else list(case)
    trials: list[Trial] = []
    precision = "full"
    for one in cases:
        found = _Trials(
            loop,
            _case(one),
            steps=steps,
            make=optimizer or _sgd,
            clip_norm=clip_norm,
            ddp=ddp,
            device=torch.device(device),
        )
        trials += found.all(uneven=uneven)
        precision = found.numbers.precision if precision == "full" else precision
    return LoopVerdict(
        loop=name or str(getattr(loop, "__name__", "the loop")),
        trials=tuple(_consistent(trials)),
        precision=precision,
        ranks=ranks(),
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
    clipped: bool = False

    def said(self, units: Sequence[float], steps: int) -> str:
        """What kind of window it is, by the units that its micro-batches turned out to have."""
        kind = "equal" if len(set(units)) == 1 else "uneven"
        short = f" (short: {self.count} of {steps})" if self.count < steps else ""
        clipped = ", clipped" if self.clipped else ""
        return f"{self.count} {kind} micro-batches{short}{clipped}"


class _Trials:
    """One case: its model as it is at the start, and the windows that the loop is given."""

    def __init__(
        self,
        loop: Loop,
        case: Case,
        *,
        steps: int,
        make: MakeOptimizer,
        clip_norm: float | None,
        ddp: bool,
        device: torch.device,
    ) -> None:
        self.loop, self.case, self.steps, self.make = loop, case, steps, make
        self.clip_norm = clip_norm
        self.ddp = ddp
        self.model = case.model().to(device)
        self.device = device
        self.numbers = Numbers()
        self.notes: list[str] = []
        self.rank = torch.distributed.get_rank() if ranks() > 1 else 0
        self._silence()

    def _silence(self) -> None:
        """Dropout would give the loop other masks than the reference, and rightly so."""
        bench = Bench(self.model, self.make(self.model), self.case.loss, numbers=self.numbers)
        micro = self.case.window(self.steps, True, self.rank)[0]
        if bench.draws_random_numbers(micro):
            bench.start.leave()
            for silence in SILENCES[: 1 if _silent(bench, micro) else 2]:
                silence(self.model)
            self.notes.append("dropout is off: its masks differ with the division, rightly so")
        else:
            bench.start.leave()

    def all(self, *, uneven: bool) -> list[Trial]:
        full, short = self.steps, self.steps - 1
        windows = [_Window(True, full), _Window(True, short)]
        if uneven:
            windows += [_Window(False, full), _Window(False, short)]
        trials, clips = [], False
        for window in windows:
            trial, watch = self._trial(window)
            trials.append(trial)
            clips = clips or bool(watch.clip_norms)
        if clips:
            trials.append(self._trial(_Window(True, full, clipped=True))[0])
        if ranks() == 1 and all(trial.found == RIGHT for trial in trials):
            trials += self._in_a_row(trials[0])
        return trials

    def _in_a_row(self, first: Trial) -> list[Trial]:
        """Where gradients are left behind: whether they are in the next window.

        The same window again, from the same weights: right loops see the same gradient again.
        """
        micros = self.case.window(self.steps, True, self.rank)
        model = copy.deepcopy(self.model)
        optimizer = self.make(model)
        start = Start(model, optimizer)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        seen: list[Tensor] = []
        for _ in range(2):
            mine = [to_device(micro, self.device) for micro in copy.deepcopy(list(micros))]
            with Watch(model, trained, clip_to=_NO_LIMIT) as watch:
                try:
                    self.loop(model, optimizer, mine)
                except Exception:  # one that sets things up cannot be called again: not our matter
                    return []
                run = watch.run(start)
            left = [(one, one.grad) for one in model.parameters()]
            if len(run.steps) != 1 or not any(_holds(gradient) for _, gradient in left):
                return []
            seen.append(flat(run.steps[0].gradients, trained))
            start.restore()
            for parameter, gradient in left:
                parameter.grad = gradient
        far, doubled = apart(seen[1], seen[0]), apart(seen[1], 2 * seen[0])
        if far <= first.tolerance or doubled > first.tolerance:
            return []
        stale = Fit("never-cleared", "the same window twice in a row", doubled, True)
        right = Fit(RIGHT, "the undivided batch", far, False)
        named = replace(first, name="2 windows in a row", found=stale.key, fits=(stale, right))
        return [named]

    # ---------------------------------------------------------------- one window

    def _trial(self, window: _Window) -> tuple[Trial, Watch]:
        micros = self.case.window(self.steps, window.even, self.rank)[: window.count]
        bench: Bench | None = None
        clip_to = _NO_LIMIT
        if window.clipped:
            bench = self._bench()
            clip_to = always_active(parts_of(bench, micros, steps=self.steps)[0])
        run, watch = self._watched(micros, clip_to)
        if watch.autocast and self.numbers.precision == "full":
            name = _NAMES.get(next(iter(watch.autocast)), "full")
            self.numbers = Numbers(name, 1024.0 if name == "fp16" else 1.0)
            bench = None
        bench = bench or self._bench()
        limit = clip_to if window.clipped else self.clip_norm
        parts, floor = parts_of(bench, micros, steps=self.steps, clip_norm=limit)
        fits, observed_by, tolerance = fits_of(bench, parts, run, micros, floor)
        notes = list(self.notes)
        found = _found(fits)
        if found is not None and observed_by == "gradients":
            notes += moved_otherwise(bench, run)
        if not window.even and len(set(parts.units)) == 1 and len(micros) > 1:
            notes.append(
                f"{self.case.name}: all micro-batches have equally many units, so a mean of means "
                "cannot be told from the mean here"
            )
        if watch.scaler_steps and not run.steps:
            notes.append("the loss scaler skipped the step: its gradients were not finite")
        return (
            Trial(
                case=self.case.name,
                name=window.said(parts.units, self.steps),
                micro_batches=len(micros),
                units=tuple(parts.units),
                optimizer_steps=len(run.steps),
                found=found,
                fits=tuple(fits),
                tolerance=tolerance,
                floor=floor,
                observed_by=observed_by,
                notes=tuple(notes),
            ),
            watch,
        )

    def _bench(self) -> Bench:
        model = copy.deepcopy(self.model)
        return Bench(model, self.make(model), self.case.loss, numbers=self.numbers)

    def _watched(self, micros: Sequence[Any], clip_to: float) -> tuple[Run, Watch]:
        """Let the loop train one window on copies, and see what it does."""
        run, watch = self._once(micros, clip_to)
        if watch.scaler_steps and not run.steps:
            with gentle_loss_scale():
                run, watch = self._once(micros, clip_to)
        return run, watch

    def _once(self, micros: Sequence[Any], clip_to: float) -> tuple[Run, Watch]:
        model = copy.deepcopy(self.model)
        optimizer = self.make(model)
        start = Start(model, optimizer)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        handed: nn.Module = model
        if self.ddp and ranks() > 1:
            handed = nn.parallel.DistributedDataParallel(model)
        mine = [to_device(micro, self.device) for micro in copy.deepcopy(list(micros))]
        with Watch(model, trained, clip_to=clip_to) as watch:
            self.loop(handed, optimizer, mine)
            run = watch.run(start)
        return run, watch


def _holds(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.detach().abs().sum() > 0)


def _silent(bench: Bench, micro: Any) -> bool:
    bench.silences = [SILENCES[0]]
    quiet = not bench.draws_random_numbers(micro)
    bench.silences = []
    bench.start.leave()
    return quiet


def _found(fits: Sequence[Fit]) -> str | None:
    right = next((fit for fit in fits if fit.key == RIGHT), None)
    if right is not None and right.fits:
        return RIGHT
    # The loop weighs its micro-batches rightly: what is wrong lies in the model.
    if any(fit.key == "coupled" and fit.fits for fit in fits):
        return "coupled"
    return fits[0].key if fits[0].fits else None


def _consistent(trials: Sequence[Trial]) -> list[Trial]:
    """Where several mistakes fit one window, the one that agrees most with the others.

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


GENTLE = 2.0**6


@contextmanager
def gentle_loss_scale() -> Iterator[None]:
    """Within it, every new GradScaler begins at 64 or lower instead of 65536."""
    original = torch.amp.GradScaler.__init__

    def gentle(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_enabled():
            self._init_scale = min(self._init_scale, GENTLE)

    setattr(torch.amp.GradScaler, "__init__", gentle)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.amp.GradScaler, "__init__", original)  # noqa: B010
