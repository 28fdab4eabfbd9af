"""The search: sizes of one mode from the largest down, then the other modes near the best.

A window's time falls as its micro-batches grow, until the device is full. Then it stays, or rises a
little if caches overflow. So a mode is followed downwards until two sizes in a row are clearly
slower than its best. Every other mode is tried at the best size, at sizes that only it can hold,
and at neighbours. It is abandoned if it is clearly slower there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wholebatch.core.readable_sizes import bytes_said
from wholebatch.tune.setting_measurements import (
    CLEARLY,
    Limits,
    SettingMeasurements,
    memory_of,
    rate_of,
)
from wholebatch.tune.settings import Predicted, RunMode, Setting, Trial
from wholebatch.tune.window_timing import Workload

SAME = 0.99
"""The fraction of the best speed above which a setting counts as equally fast."""

COMFORTABLE = 0.9
"""The fraction of the budget up to which saving memory by accumulation is of no use."""


class SearchObserver(Protocol):
    """An observer of the search."""

    def begin(self, setting: Setting, *, of: int) -> None:
        """Called before a setting is measured; at most `of` are left, this one included."""

    def end(self, trial: Trial) -> None:
        """Called with the result."""


@dataclass
class Search:
    """All trials of one tuning, in the order they were made."""

    workload: Workload
    samples: int
    sizes: Sequence[int]
    modes: Sequence[RunMode]
    predicted: Predicted
    budget: int
    limits: Limits = field(default_factory=Limits)
    watch: SearchObserver | None = None
    now: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._began = self.now()
        self._measurements = SettingMeasurements(
            self.workload, self.samples, self.predicted, self.budget, self.limits, self.now
        )
        self.trials = self._measurements.trials
        for mode in self.modes:  # Predict before measuring: predictions hold a model.
            for size in self.sizes:
                self.predicted.of(Setting(size, mode))
        self.predicted.let_go()

    # ------------------------------------------------------------------ search

    def run(self) -> None:
        """Measure the settings that can be best, and prune the rest with a reason."""
        for mode in self.modes:
            self._prune(mode)
            if mode == self.modes[0] or self.best is None:
                self._downwards(mode)
            else:
                self._beside(mode, self.best)
        self._measurements.again()

    def run_all(self) -> None:
        """Measure everything that fits, as a check of the search."""
        for mode in self.modes:
            self._prune(mode)
            for size in self.sizes:
                self._measure(Setting(size, mode), stops=False)
        self._measurements.again()

    @property
    def best(self) -> Trial | None:
        return self._measurements.best

    def recommended(self) -> Trial | None:
        """Return the trial with the fewest steps among the fastest that leave memory free.

        If none leaves a tenth of the budget free, return the one with the least memory.
        """
        best = self.best
        if best is None:
            return None
        same = [
            trial
            for trial in self.trials.values()
            if trial.is_measured
            and (rate_of(trial) >= SAME * rate_of(best) or trial.setting in self._measurements.tied)
        ]
        roomy = [trial for trial in same if memory_of(trial) <= COMFORTABLE * self.budget]
        fewest = min((trial.steps for trial in roomy), default=0)
        same = [trial for trial in roomy if trial.steps == fewest] or same
        least = min(memory_of(trial) for trial in same)
        lean = [trial for trial in same if memory_of(trial) <= 1.02 * least]
        return min(lean, key=lambda trial: (trial.steps, -rate_of(trial)))

    def measured(self, setting: Setting) -> Trial:
        """Return the trial of a setting; if it is new, measure it, but keep it out of `trials`."""
        known = self.trials.get(setting)
        if known is not None and known.is_measured:
            return known
        why = self._too_large(setting)
        if why is not None:
            return self._measurements.blank(setting, status="pruned", why=why)
        return self._measurements.measure(setting, stops=False)

    def _downwards(self, mode: RunMode) -> None:
        slower = 0
        fastest = 0.0
        for size in self.sizes:
            setting = Setting(size, mode)
            if setting in self.trials:
                continue
            if slower >= 2:
                self._leave(setting, "two larger ones in a row were slower than the best")
                continue
            trial = self._measure(setting)
            if trial.status in ("measured", "stopped"):  # A setting that was given up has no rate.
                slower = slower + 1 if rate_of(trial) < CLEARLY * fastest else 0
                fastest = max(fastest, rate_of(trial))

    def _beside(self, mode: RunMode, best: Trial) -> None:
        """Try the best size so far, sizes that only this mode can hold, then neighbours."""
        sizes = list(self.sizes)
        at = sizes.index(best.setting.micro_batch)
        if mode.checkpointing:
            # Checkpointing computes more. It can only win with a size that does not fit without it.
            plain = mode._replace(checkpointing=False)
            for size in self.sizes:
                if self._holds(Setting(size, plain)):
                    self._leave(Setting(size, mode), "fits without checkpointing, which costs time")
        open_sizes = [size for size in self.sizes if Setting(size, mode) not in self.trials]
        order = sorted(open_sizes, key=lambda size: abs(sizes.index(size) - at))
        fastest, slower = 0.0, 0
        for size in order:
            setting = Setting(size, mode)
            if slower >= 1 and fastest < CLEARLY * rate_of(self.best):
                self._leave(setting, "this way is slower at the best size")
                continue
            if slower >= 2:
                self._leave(setting, "further from this way's best size, and slower there")
                continue
            trial = self._measure(setting)
            if trial.status in ("measured", "stopped"):
                is_best = rate_of(trial) >= fastest
                worse = rate_of(trial) < CLEARLY * max(fastest, rate_of(self.best))
                slower = slower + 1 if worse or not is_best else 0
                fastest = max(fastest, rate_of(trial))

    def _holds(self, setting: Setting) -> bool:
        """True if the setting fits, as far as is known."""
        trial = self.trials.get(setting)
        return self.predicted.fits(setting) and (trial is None or trial.status != "failed")

    def _too_large(self, setting: Setting) -> str | None:
        need = self.predicted.need(setting)
        if need is None or need <= self.budget:
            return None
        return f"predicted to need {bytes_said(need)} of {bytes_said(self.budget)}"

    def _prune(self, mode: RunMode) -> None:
        for size in self.sizes:
            why = self._too_large(Setting(size, mode))
            if why is not None and Setting(size, mode) not in self.trials:
                self._leave(Setting(size, mode), why)

    def _leave(self, setting: Setting, why: str) -> None:
        self.trials[setting] = self._measurements.blank(setting, status="pruned", why=why)

    # ----------------------------------------------------------------- measure

    def _measure(self, setting: Setting, *, stops: bool = True) -> Trial:
        if setting in self.trials:
            return self.trials[setting]
        out_of_time = self._measurements.since(self._began) > self.limits.total
        if out_of_time and self.best is not None:
            self._leave(setting, f"not reached in {self.limits.total:.0f} s")
            return self.trials[setting]
        left = sum(Setting(s, w) not in self.trials for w in self.modes for s in self.sizes)
        if self.watch is not None:
            self.watch.begin(setting, of=left)
        trial = self._measurements.measure(setting, stops=stops)
        self.trials[setting] = trial
        if self.watch is not None:
            self.watch.end(trial)
        return trial
