"""The settings to search, and a prediction of which do not fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wholebatch.memory.budget import bytes_said
from wholebatch.tune.setting_measurements import CLEARLY, Bench, Limits, Subject, memory_of, rate_of
from wholebatch.tune.settings import Predicted, Setting, Trial, Way, steps_of

__all__ = ["Limits", "Search", "Watch"]


SAME = 0.99
"""The fraction of the best speed above which a setting counts as equally fast."""


class Watch(Protocol):
    """An observer of the search."""

    def begin(self, setting: Setting, *, of: int) -> None:
        """Called before a setting is measured; at most `of` are left, this one included."""

    def end(self, trial: Trial) -> None:
        """Called with the result."""


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
    now: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._began = self.now()
        self._bench = Bench(
            self.subject, self.samples, self.predicted, self.budget, self.limits, self.now
        )
        self.trials = self._bench.trials
        for way in self.ways:  # Predict before measuring: predictions hold a model.
            for size in self.sizes:
                self.predicted.of(Setting(size, way))
        self.predicted.let_go()

    # ------------------------------------------------------------------ search

    def run(self) -> None:
        """Measure the settings that can be best, and prune the rest with a reason."""
        for way in self.ways:
            self._prune(way)
            if way == self.ways[0]:
                self._downwards(way)
            elif self._bench.best is not None:
                self._beside(way)
            else:
                self._downwards(way)
        self._bench.again()

    def run_all(self) -> None:
        """Measure everything that fits, as a check of the search."""
        for way in self.ways:
            self._prune(way)
            for size in self.sizes:
                self._measure(Setting(size, way), stops=False)
        self._bench.again()

    @property
    def best(self) -> Trial | None:
        """Return the fastest trial so far."""
        return self._bench.best

    def recommended(self) -> Trial | None:
        """Return the trial with the least memory among the fastest; at a tie, the fewest steps."""
        best = self._bench.best
        if best is None:
            return None
        same = [
            trial
            for trial in self.trials.values()
            if trial.is_measured
            and (rate_of(trial) >= SAME * rate_of(best) or trial.setting in self._bench.tied)
        ]
        least = min(memory_of(trial) for trial in same)
        lean = [trial for trial in same if memory_of(trial) <= 1.02 * least]
        return min(lean, key=lambda trial: (trial.steps, -rate_of(trial)))

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
            if trial.status in ("measured", "stopped"):  # A setting that was given up has no rate.
                slower = slower + 1 if rate_of(trial) < CLEARLY * fastest else 0
                fastest = max(fastest, rate_of(trial))

    def _beside(self, way: Way) -> None:
        """Try the best size so far, sizes that only this way can hold, then neighbours."""
        assert self._bench.best is not None
        at = self._bench.best.setting.micro_batch
        if way.checkpointing:
            # Checkpointing computes more. It can only win with a size that does not fit without it.
            plain = way._replace(checkpointing=False)
            for size in self.sizes:
                if self._holds(Setting(size, plain)):
                    self._leave(Setting(size, way), "fits without checkpointing, which costs time")
        open_sizes = [size for size in self.sizes if Setting(size, way) not in self.trials]
        order = sorted(open_sizes, key=lambda size: abs(self.sizes.index(size) - self._place(at)))
        fastest, slower = 0.0, 0
        for size in order:
            setting = Setting(size, way)
            if slower >= 1 and fastest < CLEARLY * rate_of(self._bench.best):
                self._leave(setting, "this way is slower at the best size")
                continue
            if slower >= 2:
                self._leave(setting, "further from this way's best size, and slower there")
                continue
            trial = self._measure(setting)
            if trial.status in ("measured", "stopped"):
                is_best = rate_of(trial) >= fastest
                worse = rate_of(trial) < CLEARLY * max(fastest, rate_of(self._bench.best))
                slower = slower + 1 if worse or not is_best else 0
                fastest = max(fastest, rate_of(trial))

    def _place(self, size: int) -> int:
        return list(self.sizes).index(size)

    def _holds(self, setting: Setting) -> bool:
        """True if the setting fits, as far as is known."""
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
        if self._bench.since(self._began) > self.limits.total and self._bench.best is not None:
            self._leave(setting, f"not reached in {self.limits.total:.0f} s")
            return self.trials[setting]
        left = sum(Setting(s, w) not in self.trials for w in self.ways for s in self.sizes)
        if self.watch is not None:
            self.watch.begin(setting, of=left)
        trial = self._bench.tried(setting, stops=stops)
        self.trials[setting] = trial
        if self.watch is not None:
            self.watch.end(trial)
        return trial
