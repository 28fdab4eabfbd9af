"""One batch through every training loop: the time, memory and gradient error of each."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.batch import to_device
from wholebatch.errors import OptionError
from wholebatch.memory.meter import free_caches
from wholebatch.plain_files import finite, write_json
from wholebatch.tune.training_loops import LOOPS, Job, TrainingLoop
from wholebatch.tune.window_timing import refuse_nonfinite, settle, usual, wait_for

_ALIKE = 1e-3
"""Two gradients of one batch that differ by more were made with random numbers."""


class Reference:
    """The gradients of the undivided batch by parameter name, in host memory."""

    def __init__(self, job: Job) -> None:
        self._gradients: dict[str, Tensor] = {}
        self.why: str | None = None
        """The reason why nothing can be compared, or None."""
        try:
            first, second = _whole(job, seed=0), _whole(job, seed=1)
        except torch.OutOfMemoryError:
            self.why = "the undivided batch does not fit in memory: updates are not compared"
            return
        if _distance(first, second) > _ALIKE:
            self.why = "the model draws random numbers: updates are not compared"
            return
        self._gradients = first

    @contextlib.contextmanager
    def watching(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[list[float]]:
        """Yield a list that receives the distance of the first step's gradient."""
        found: list[float] = []

        def compare() -> None:
            if not found and self._gradients:
                found.append(_distance(_gradients_of(model), self._gradients))

        def before_step(_: object, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            closure = given[1] if len(given) > 1 else named.get("closure")
            if closure is None:
                compare()
                return None

            def watched() -> Any:  # Some frameworks run the last backward only in the closure.
                result = closure()
                compare()
                return result

            if len(given) > 1:
                return (given[0], watched, *given[2:]), named
            return given, {**named, "closure": watched}

        with optimizer.register_step_pre_hook(before_step):
            yield found


def _whole(job: Job, *, seed: int) -> dict[str, Tensor]:
    model, _ = job.make()
    torch.manual_seed(seed)
    with job.autocast():
        loss = job.mean(model, to_device(job.first, job.device))
    refuse_nonfinite(float(loss.detach()))
    loss.backward()
    if job.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
    return _gradients_of(model)


def _gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.detach().to("cpu", torch.float32, copy=True)
        if parameter.grad.dtype.itemsize < 4
        else parameter.grad.detach().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not parameter.grad.is_sparse
    }


def _distance(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the relative distance over all parameters; a missing gradient counts as zero."""
    off = norm = 0.0
    for name in found.keys() | right.keys():
        one, other = found.get(name), right.get(name)
        difference = other if one is None else one if other is None else one - other
        assert difference is not None
        off += float(difference.double().square().sum())
        norm += 0.0 if other is None else float(other.double().square().sum())
    return float((off / (norm or 1.0)) ** 0.5)


WRONG = 0.01
"""From here on a gradient error is no rounding: it is another gradient than that of the batch."""
DRIFT = 0.05
"""The largest difference between both measurements of the first row that goes unreported."""


@dataclass(frozen=True)
class LoopRow:
    """One loop: the time of a window, its peak memory, and the error of its gradient."""

    name: str
    seconds: tuple[float, ...] = ()
    peak: int | None = None
    off: float | None = None
    """The relative distance of its first gradient from that of the undivided batch."""
    why: str = ""

    @property
    def window(self) -> float | None:
        """Return the seconds of a window: the median of the faster half, to exclude other work."""
        return usual(sorted(self.seconds)) if self.seconds else None

    @property
    def is_wrong(self) -> bool:
        """True if its gradient is not that of the undivided batch."""
        return self.off is not None and not self.off <= WRONG  # nor is one that is not finite

    def summary(self, first: LoopRow) -> str:
        """Return the speed beside the first loop and the gradient error, in words.

        >>> ours, other = LoopRow("ours", (0.119,), off=3e-8), LoopRow("other", (0.1,), off=0.18)
        >>> other.summary(ours)
        '1.19× faster, gradient 18% wrong'
        >>> ours.summary(ours)
        'gradient right (3e-08)'
        """
        said = []
        if self is not first and self.window and first.window:
            slower = self.window / first.window
            times = f"{slower:.2f}× slower" if slower > 1 else f"{1 / slower:.2f}× faster"
            said.append("same speed" if round(slower, 2) == 1 else times)
        if self.off is not None:
            wrong = f"gradient {self.off:.0%} wrong"
            said.append(wrong if self.is_wrong else f"gradient right ({self.off:.1g})")
        return ", ".join(said)


@dataclass(frozen=True)
class LoopComparison:
    """The results of every loop, in comparison with the first."""

    rows: tuple[LoopRow, ...]
    steps: int
    micro_batch: int
    again: float | None = None
    """The seconds of a window of the first row, measured again at the end."""
    why: str | None = None
    """The reason why updates are not compared, or None."""
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def drift(self) -> float | None:
        """Return how much slower (below 0: faster) the machine was at the end."""
        first = self.rows[0].window if self.rows else None
        return None if not first or self.again is None else self.again / first - 1

    @property
    def notes(self) -> list[str]:
        """Return the remarks that a reader needs beside the numbers."""
        said = [f"{row.name}: {row.why}" for row in self.rows if row.why]
        said += [self.why] if self.why else []
        if self.drift is not None and abs(self.drift) > DRIFT:
            way = "slower" if self.drift > 0 else "faster"
            said.append(
                f"the machine was {abs(self.drift):.0%} {way} at the end than at the beginning "
                f"({self.rows[0].name} was measured twice): differences of that size mean nothing"
            )
        return said

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `bench.json`, for `wholebatch report`."""
        first = self.rows[0].window if self.rows else None
        rows = [
            {
                "way": row.name,
                "ms": None if row.window is None else 1000 * row.window,
                "times_the_first": None if not first or not row.window else row.window / first,
                "peak_bytes": row.peak,
                "gradient_off_by": row.off,
                "is_wrong": row.is_wrong,
                "summary": row.summary(self.rows[0]),
                "windows": len(row.seconds),
                "note": row.why or None,
            }
            for row in self.rows
        ]
        result: dict[str, Any] = finite(
            {
                "kind": "wholebatch bench",
                "about": dict(self.about),
                "micro_batch": self.micro_batch,
                "steps": self.steps,
                "drift": self.drift,
                "notes": self.notes,
                "rows": rows,
            }
        )
        return result

    def write(self, path: Path) -> None:
        write_json(path, self.to_dict())


def bench(
    job: Job,
    names: Sequence[str] | None = None,
    *,
    seconds: float = 4.0,
    least: int = 4,
    begin: Callable[[str], None] = lambda name: None,
    end: Callable[[LoopRow], None] = lambda row: None,
    clock: Callable[[], float] = time.perf_counter,
    about: Mapping[str, Any] | None = None,
) -> LoopComparison:
    """Time each of `names` (default: all installed) for `seconds` and at least `least` windows.

    A loop that fails gives the reason in its row and does not stop the others.
    """
    loops = _chosen(names)
    begin("the undivided batch's gradient")
    reference = Reference(job)
    timed = partial(_timed_row, job, reference, seconds=seconds, least=least, clock=clock)
    rows: list[LoopRow] = []
    for loop in loops:
        begin(loop.name)
        row = _measured(loop, timed)
        rows.append(row)
        end(row)
    again = None
    if len(rows) > 1 and rows[0].seconds:
        begin(f"{loops[0].name}, once more")
        again = _measured(loops[0], timed).window
    return LoopComparison(
        tuple(rows), job.steps, job.micro_batch, again, reference.why, about or {}
    )


def _chosen(names: Sequence[str] | None) -> list[TrainingLoop]:
    if names is None:
        return [loop for loop in LOOPS.values() if loop.package is None or find_spec(loop.package)]
    for name in names:
        if name not in LOOPS:
            raise OptionError(f"{name}: is no way that is known; those are {', '.join(LOOPS)}")
    if not names:
        raise OptionError(f"no way is named; those that are known: {', '.join(LOOPS)}")
    return [LOOPS[name] for name in dict.fromkeys(names)]


def _measured(loop: TrainingLoop, timed: Callable[[TrainingLoop], LoopRow]) -> LoopRow:
    if loop.package is not None and not find_spec(loop.package):
        return LoopRow(loop.name, why=f"not installed (pip install {loop.package})")
    try:
        with contextlib.nullcontext() if loop.package is None else _quiet():
            return timed(loop)
    except torch.OutOfMemoryError:
        return LoopRow(loop.name, why="out of memory")
    except Exception as error:  # Another library's error fails its own row only.
        why = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
        return LoopRow(loop.name, why=why)
    finally:
        free_caches()


def _timed_row(
    job: Job,
    reference: Reference,
    loop: TrainingLoop,
    *,
    seconds: float,
    least: int,
    clock: Callable[[], float],
) -> LoopRow:
    model, optimizer = job.make()
    job.is_compiled = False
    updates = loop.updates(job, model, optimizer)

    def window() -> float:
        began = clock()
        next(updates)
        wait_for(job.device)
        return clock() - began

    try:
        with reference.watching(model, optimizer) as off:
            window()
            settle(window, most=max(seconds, 2.0))
            job.meter.reset()
            taken: list[float] = []
            while len(taken) < least or sum(taken) < seconds:
                taken.append(window())
            peak = None
            if job.device.type == "cuda" or not job.is_compiled:
                peak = job.meter.peak(window, model, optimizer)
            return LoopRow(loop.name, tuple(taken), peak, off[0] if off else None)
    finally:
        updates.close()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of other libraries about their own loops."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
