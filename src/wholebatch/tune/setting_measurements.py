"""The measurement of settings, one after the other, and of close ones in turn.

A CPU is shared with other work. There every setting is measured in turn with the fastest so far,
and its speed is that of the fastest times the ratio of their windows. A GPU belongs to the run
alone, so every setting is measured by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from wholebatch.errors import WholebatchError
from wholebatch.memory.budget import bytes_said, free_memory
from wholebatch.tune.interleaved_timing import Turns
from wholebatch.tune.search_space import Predicted
from wholebatch.tune.setting_run import Agreed, Running, Subject, TooSlow
from wholebatch.tune.settings import Setting, Trial, steps_of

__all__ = ["CLEARLY", "Bench", "Limits", "memory_of", "rate_of"]

_log = logging.getLogger("wholebatch")

CLEARLY = 0.9
"""The fraction of the best speed below which a setting is slower, whatever the noise."""
HOPELESS = 3
"""A first window longer than this multiple of the best one ends the measurement."""
SURE = 5
"""Rounds after which a setting that is clearly slower than the best is given up."""
CLOSE = 0.93
"""The fraction of the best speed above which settings are measured again, in turn."""
TIED, AT_LEAST = 0.98, 0.95
"""When a setting ties with the best.

Its median ratio is at least `TIED`, and its interval starts at `AT_LEAST` or above and reaches 1.
"""
ROOM = 0.5
"""The fraction of the free memory that settings measured in turn may take."""

_FEW, _TURNS, _MANY = 6, 12, 60
"""Rounds of close settings: at least, as a rule, and at most."""


@dataclass(frozen=True)
class Limits:
    """The time limits. `total`: no new setting is begun after this many seconds."""

    total: float = 300.0
    seconds: float = 1.0
    least: int = 3
    most: int = 30
    warm_up: float = 120.0


@dataclass(frozen=True)
class Speed:
    """The result of the windows of one setting."""

    seconds: float
    rate: float
    windows: int
    is_stopped: bool


@dataclass
class Bench:
    """Measures settings; `trials` holds the results."""

    subject: Subject
    samples: int
    predicted: Predicted
    budget: int
    limits: Limits
    now: Callable[[], float] = time.perf_counter
    trials: dict[Setting, Trial] = field(default_factory=dict)
    tied: set[Setting] = field(default_factory=set)
    """The settings that the last rounds could not distinguish from the fastest."""

    def __post_init__(self) -> None:
        self._lead: Running | None = None  # The fastest so far, kept for comparisons.

    @property
    def best(self) -> Trial | None:
        """Return the fastest trial so far."""
        measured = [trial for trial in self.trials.values() if trial.is_measured]
        return max(measured, key=lambda t: t.units_per_second or 0.0, default=None)

    def tried(self, setting: Setting, *, stops: bool) -> Trial:
        """Measure one setting; with `stops`, end as soon as it is clearly slower than the best."""
        steps = steps_of(self.samples, setting.micro_batch)
        found = self.predicted.of(setting)
        blank = Trial(setting, steps, "failed", "", predicted=None if found is None else found.peak)
        partner = self._partner(setting)
        running: Running | None = None
        is_kept = False
        try:
            running = Running(self.subject, setting)
            running.warm_up(most=self.limits.warm_up, patience=self._patience(partner))
            if partner is None:
                speed = self._alone(running, stops=stops)
            else:
                speed = self._in_turn(running, partner, stops=stops)
            if running.train.recoveries:  # It ran with smaller micro-batches than this one.
                return blank.with_(why="ran out of memory")
            if (otherwise := running.fell_back()) is not None:
                return blank.with_(why=otherwise[:200])
            # A rejected setting need not be known as well.
            peak = None if speed.is_stopped else running.peak()
            over = peak is not None and peak > self.budget
            split = {} if speed.is_stopped else _split_of(running)
            is_kept = not (speed.is_stopped or over) and self._leads(running, speed)
            update_bytes = running.update_bytes()
        except TooSlow:
            why = f"stopped in its first window: more than {HOPELESS} times slower"
            return blank.with_(status="stopped", why=why, windows=1)
        except torch.OutOfMemoryError:
            return blank.with_(why="ran out of memory")
        except (WholebatchError, RuntimeError) as error:
            return blank.with_(why=str(error).strip().split("\n")[0][:200])
        finally:
            if running is not None and not is_kept:
                running.close()
        why = "measured"
        if speed.is_stopped:
            why = f"stopped after {speed.windows} windows: clearly slower"
        elif over:
            why = f"needs {bytes_said(peak or 0)}, more than {bytes_said(self.budget)}"
        return blank.with_(
            status="failed" if over else "stopped" if speed.is_stopped else "measured",
            why=why,
            seconds=speed.seconds,
            windows=speed.windows,
            units_per_second=speed.rate,
            peak=peak,
            split=split,
            update_bytes=update_bytes,
        )

    def _alone(self, running: Running, *, stops: bool) -> Speed:
        best, limits = self.best, self.limits
        slow = CLEARLY * rate_of(best) if best is not None and stops else None
        timing = running.timed(
            least=limits.least, seconds=limits.seconds, most=limits.most, too_slow=slow
        )
        is_stopped = slow is not None and timing.fastest < slow
        return Speed(timing.seconds, timing.rate, len(timing.windows), is_stopped)

    def _in_turn(self, running: Running, partner: Running, *, stops: bool) -> Speed:
        """Measure in turn with the fastest so far, whose speed is known."""
        known, limits = self.trials[partner.setting], self.limits
        assert known.seconds is not None
        turns = Turns(self.subject, (partner, running))
        while (made := len(turns.rounds)) < limits.most and (
            made < limits.least or turns.spent(1) < limits.seconds
        ):
            turns.round()
            if stops and made + 1 >= SURE and turns.ratio(1, 0).high < CLEARLY:
                break
        ratio = turns.ratio(1, 0)
        return Speed(
            known.seconds / ratio.median,
            rate_of(known) * ratio.median,
            len(turns.rounds),
            stops and ratio.high < CLEARLY,
        )

    # ----------------------------------------------------------- the fastest so far

    def _partner(self, setting: Setting) -> Running | None:
        """Return the fastest so far, ready to run; None if it cannot be held beside this one."""
        best = self.best
        if best is None or not self._is_shared or not self._has_room(setting, best):
            self._let_go()
            return None
        if self._lead is None:
            self._lead = Running(self.subject, best.setting)
            self._lead.warm_up(most=self.limits.warm_up)
        return self._lead

    @property
    def _is_shared(self) -> bool:
        """True if other processes use the device too: a GPU belongs to the run alone."""
        return self.predicted.device.type == "cpu"

    def _has_room(self, *settings: Setting | Trial) -> bool:
        """True if all of these fit in memory at once, on every rank."""
        known = self.best
        largest = 0 if known is None else memory_of(known)
        wanted = 0
        for one in settings:
            need = memory_of(one) if isinstance(one, Trial) else self.predicted.need(one)
            wanted += need or largest
        missing = wanted - ROOM * free_memory(self.predicted.device)
        return Agreed(self.predicted.device)(missing) <= 0

    def _leads(self, running: Running, speed: Speed) -> bool:
        """Keep this one if it is the fastest so far."""
        best = self.best
        if not self._is_shared or (best is not None and speed.rate <= rate_of(best)):
            return False
        self._let_go()
        self._lead = running
        return True

    def _let_go(self) -> None:
        if self._lead is not None:
            self._lead.close()
        self._lead = None

    def _patience(self, partner: Running | None) -> float | None:
        """Return the time limit of a first window in seconds; it may include one-time work."""
        best = self.best
        if best is None or best.seconds is None:
            return None
        usual = best.seconds
        if partner is not None:  # Its present time, by the clock of the first window.
            began = self.now()
            partner.window()
            usual = max(usual, self.since(began))
        return max(HOPELESS * usual, usual + 2.0)

    def again(self) -> None:
        """Measure the best and those close to it again, one window of each in turn.

        Settings that would have to be compiled again are left out.
        """
        self._let_go()
        best = self.best
        if best is None or not self._is_shared:
            return
        close = [
            trial
            for trial in self.trials.values()
            if trial.is_measured
            and rate_of(trial) >= CLOSE * rate_of(best)
            and trial.setting.way.execute == "eager"
        ]
        close = sorted(close, key=rate_of, reverse=True)[:3]
        while len(close) > 1 and not self._has_room(*close):
            close.pop()
        if len(close) < 2:
            return
        made: list[Running] = []
        try:
            for trial in close:
                made.append(Running(self.subject, trial.setting))
                made[-1].window()
            turns = Turns(self.subject, made)
            began = self.now()
            for turn in range(_MANY):
                if turn >= _FEW and self.since(began) > 30 * self.limits.seconds:
                    break
                if turn >= _TURNS and turns.spent(0) > 2 * self.limits.seconds:
                    break
                turns.round()
        finally:
            for running in made:
                running.close()
        first = close[0]
        assert first.seconds is not None
        fastest = max(range(len(close)), key=lambda at: turns.ratio(at, 0).median)
        for at, trial in enumerate(close):
            ratio, beside = turns.ratio(at, 0).median, turns.ratio(at, fastest)
            if beside.median >= TIED and beside.low >= AT_LEAST and beside.high >= 1.0:
                self.tied.add(trial.setting)
            self.trials[trial.setting] = trial.with_(
                seconds=first.seconds / ratio,
                windows=trial.windows + len(turns.rounds),
                units_per_second=rate_of(first) * ratio,
                why="measured, and again in turn with the best",
            )

    def since(self, moment: float) -> float:
        """Return the seconds since then, on the slowest rank."""
        return Agreed(self.predicted.device)(self.now() - moment)


def _split_of(running: Running) -> dict[str, float]:
    """Return the split, or {} if the profiler fails: that must not fail a setting."""
    try:
        return running.split()
    except (RuntimeError, AttributeError) as error:
        _log.warning("where the time of a window goes could not be measured: %s", error)
        return {}


def rate_of(trial: Trial) -> float:
    """Return the units per second; 0 if unknown."""
    return trial.units_per_second or 0.0


def memory_of(trial: Trial) -> int:
    """Return the peak as measured, else as predicted."""
    return trial.peak or trial.predicted or 0
