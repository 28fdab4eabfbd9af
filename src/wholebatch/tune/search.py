"""The search: sizes of one way from the largest down, then the other ways near the best.

A window's time falls with the size of its micro-batches until the device is full, and then stays,
or rises a little where caches overflow. So a way is followed downwards until two sizes in a row
are clearly slower than its best. Another way is tried at the best size, at those that only it can
hold, and beside it; one that is clearly slower there is left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from wholebatch.errors import WholebatchError
from wholebatch.memory.budget import bytes_said
from wholebatch.tune.measure import Agreed, Running, Subject, Timing, TooSlow
from wholebatch.tune.settings import Setting, Trial, Way, steps_of
from wholebatch.tune.space import Predicted

__all__ = ["Limits", "Search", "Watch"]

_log = logging.getLogger("wholebatch")

CLEARLY = 0.9
"""Of the best speed: below it a setting is slower, whatever noise there is."""
HOPELESS = 3
"""Times the best window: longer, and the first one is enough."""
CLOSE = 0.95
"""Of the best speed: above it a setting is measured again, in turn with the best."""
SAME = 0.99
"""Of the best speed: above it the setting that needs the least memory is taken."""

_TURNS = 12


class Watch(Protocol):
    """Who is told how the search goes."""

    def begin(self, setting: Setting, *, of: int) -> None:
        """This one is measured now; at most `of` are left with it."""

    def end(self, trial: Trial) -> None:
        """This is what was found."""


@dataclass(frozen=True)
class Limits:
    """How long things may take. `total`: no new setting is begun after so many seconds."""

    total: float = 300.0
    seconds: float = 1.0
    least: int = 3
    most: int = 30
    warm_up: float = 120.0


@dataclass
class Search:
    """All trials of one tuning, in the order they were made."""

    subject: Subject
    samples: int
    sizes: Sequence[int]
    ways: Sequence[Way]
    predicted: Predicted
    budget: int
    limits: Limits = field(default_factory=Limits)
    watch: Watch | None = None
    trials: dict[Setting, Trial] = field(default_factory=dict)
    now: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._began = self.now()
        for way in self.ways:  # before anything is measured: predictions hold a model
            for size in self.sizes:
                self.predicted.of(Setting(size, way))
        self.predicted.let_go()

    # ------------------------------------------------------------------ search

    def run(self) -> None:
        """Measure what can be best, and prune the rest, saying why."""
        for way in self.ways:
            self._prune(way)
            if way == self.ways[0]:
                self._downwards(way)
            elif self.best is not None:
                self._beside(way)
            else:
                self._downwards(way)
        self._again()

    def run_all(self) -> None:
        """Measure everything that fits, to hold the search against."""
        for way in self.ways:
            self._prune(way)
            for size in self.sizes:
                self._measure(Setting(size, way), stops=False)
        self._again()

    @property
    def best(self) -> Trial | None:
        """The fastest so far."""
        measured = [trial for trial in self.trials.values() if trial.is_measured]
        return max(measured, key=lambda t: t.units_per_second or 0.0, default=None)

    def recommended(self) -> Trial | None:
        """Of those as fast as the best, the one that needs the least memory."""
        best = self.best
        if best is None:
            return None
        same = [
            trial
            for trial in self.trials.values()
            if trial.is_measured and _rate(trial) >= SAME * _rate(best)
        ]
        return min(same, key=lambda t: (t.peak or t.predicted or 0, -_rate(t)))

    def _downwards(self, way: Way) -> None:
        slower = 0
        fastest = 0.0
        for size in self.sizes:
            setting = Setting(size, way)
            if setting in self.trials:
                continue
            if slower >= 2:
                self._leave(setting, "two larger ones in a row were slower than the best")
                continue
            trial = self._measure(setting)
            if trial.status in ("measured", "stopped"):  # one that was given up has no rate
                slower = slower + 1 if _rate(trial) < CLEARLY * fastest else 0
                fastest = max(fastest, _rate(trial))

    def _beside(self, way: Way) -> None:
        """The best size of the ways before, what only this way can hold, then neighbours."""
        assert self.best is not None
        at = self.best.setting.micro_batch
        if way.checkpointing:
            # It computes more. What it can gain is a size that does not fit without it.
            plain = way._replace(checkpointing=False)
            for size in self.sizes:
                if self._holds(Setting(size, plain)):
                    self._leave(Setting(size, way), "fits without checkpointing, which costs time")
        open_sizes = [size for size in self.sizes if Setting(size, way) not in self.trials]
        order = sorted(open_sizes, key=lambda size: abs(self.sizes.index(size) - self._place(at)))
        fastest, slower = 0.0, 0
        for size in order:
            setting = Setting(size, way)
            if slower >= 1 and fastest < CLEARLY * _rate(self.best):
                self._leave(setting, "this way is slower at the best size")
                continue
            if slower >= 2:
                self._leave(setting, "further from this way's best size, and slower there")
                continue
            trial = self._measure(setting)
            if trial.status in ("measured", "stopped"):
                is_best = _rate(trial) >= fastest
                worse = _rate(trial) < CLEARLY * max(fastest, _rate(self.best))
                slower = slower + 1 if worse or not is_best else 0
                fastest = max(fastest, _rate(trial))

    def _place(self, size: int) -> int:
        return list(self.sizes).index(size)

    def _holds(self, setting: Setting) -> bool:
        """Whether it fits, as far as anyone knows."""
        trial = self.trials.get(setting)
        return self.predicted.fits(setting) and (trial is None or trial.status != "failed")

    def _prune(self, way: Way) -> None:
        for size in self.sizes:
            setting = Setting(size, way)
            need = self.predicted.need(setting)
            if need is not None and need > self.budget and setting not in self.trials:
                self._leave(
                    setting,
                    f"predicted to need {bytes_said(need)} of {bytes_said(self.budget)}",
                )

    def _leave(self, setting: Setting, why: str) -> None:
        found = self.predicted.of(setting)
        peak = None if found is None else found.peak
        steps = steps_of(self.samples, setting.micro_batch)
        self.trials[setting] = Trial(setting, steps, "pruned", why, predicted=peak)

    # ----------------------------------------------------------------- measure

    def _measure(self, setting: Setting, *, stops: bool = True) -> Trial:
        if setting in self.trials:
            return self.trials[setting]
        if self._since(self._began) > self.limits.total and self.best is not None:
            self._leave(setting, f"not reached in {self.limits.total:.0f} s")
            return self.trials[setting]
        left = sum(Setting(s, w) not in self.trials for w in self.ways for s in self.sizes)
        if self.watch is not None:
            self.watch.begin(setting, of=left)
        best = self.best
        slow = CLEARLY * _rate(best) if best is not None and stops else None
        trial = self._tried(setting, slow)
        self.trials[setting] = trial
        if self.watch is not None:
            self.watch.end(trial)
        return trial

    def _tried(self, setting: Setting, slow: float | None) -> Trial:
        steps = steps_of(self.samples, setting.micro_batch)
        found = self.predicted.of(setting)
        blank = Trial(setting, steps, "failed", "", predicted=None if found is None else found.peak)
        limits = self.limits
        running: Running | None = None
        try:
            running = Running(self.subject, setting)
            running.warm_up(most=limits.warm_up, patience=self._patience())
            timing = running.timed(
                least=limits.least, seconds=limits.seconds, most=limits.most, too_slow=slow
            )
            if running.train.recoveries:  # a smaller micro-batch than this one went through
                return blank.with_(why="ran out of memory")
            if (otherwise := running.fell_back()) is not None:
                return blank.with_(why=otherwise[:200])
            count = len(timing.windows)
            stopped = slow is not None and timing.fastest < slow
            # What is not to be taken need not be known so well.
            peak = None if stopped else running.peak()
            split = {} if stopped else _split_of(running)
        except TooSlow:
            why = f"stopped in its first window: more than {HOPELESS} times slower"
            return blank.with_(status="stopped", why=why, windows=1)
        except torch.OutOfMemoryError:
            return blank.with_(why="ran out of memory")
        except (WholebatchError, RuntimeError) as error:
            return blank.with_(why=str(error).strip().split("\n")[0][:200])
        finally:
            if running is not None:
                running.close()
        over = peak is not None and peak > self.budget
        why = "measured"
        if stopped:
            why = f"stopped after {count} windows: clearly slower"
        elif over:
            why = f"needs {bytes_said(peak or 0)}, more than {bytes_said(self.budget)}"
        return blank.with_(
            status="failed" if over else "stopped" if stopped else "measured",
            why=why,
            seconds=timing.seconds,
            windows=count,
            units_per_second=timing.rate,
            peak=peak,
            split=split,
        )

    def _since(self, moment: float) -> float:
        return Agreed(self.predicted.device)(self.now() - moment)

    def _patience(self) -> float | None:
        """Seconds for a first window, which may have something to do that others have not."""
        best = self.best
        if best is None or best.seconds is None:
            return None
        return max(HOPELESS * best.seconds, best.seconds + 2.0)

    def _again(self) -> None:
        """Measure the best and those close to it once more, one window of each in turn.

        What else the machine does comes and goes: in turn, it comes over all of them alike. Ways
        that must be compiled first are not made again for it.
        """
        best = self.best
        if best is None:
            return
        close = [
            trial
            for trial in self.trials.values()
            if trial.is_measured
            and _rate(trial) >= CLOSE * _rate(best)
            and trial.setting.way.execute == "eager"
        ]
        close = sorted(close, key=_rate, reverse=True)[:4]
        if len(close) < 2 or self.predicted.device.type == "cuda":
            return  # a GPU is the run's own: nothing else comes and goes there
        made = [Running(self.subject, trial.setting) for trial in close]
        try:
            for running in made:
                running.window()
            timings = [Timing() for _ in made]
            began = self.now()
            for turn in range(_TURNS):
                if turn >= _TURNS // 2 and self._since(began) > _TURNS * self.limits.seconds:
                    break
                for timing, running in zip(timings, made, strict=True):
                    seconds, step = running.window()
                    timing.add(seconds, step.units)
        finally:
            for running in made:
                running.close()
        for trial, timing in zip(close, timings, strict=True):
            self.trials[trial.setting] = trial.with_(
                seconds=timing.seconds,
                windows=trial.windows + len(timing.windows),
                units_per_second=timing.rate,
                why="measured, and again in turn with the best",
            )


def _split_of(running: Running) -> dict[str, float]:
    """The split, which is evidence: a profiler that does not work here costs no setting."""
    try:
        return running.split()
    except (RuntimeError, AttributeError) as error:
        _log.warning("where the time of a window goes could not be measured: %s", error)
        return {}


def _rate(trial: Trial) -> float:
    return trial.units_per_second or 0.0
