"""Measuring one setting after the other, and those that are close in turn.

On a CPU, which has other things to do, every setting is measured in turn with the fastest so far,
and its speed is that one's times the ratio of their windows. A GPU is the run's own: there every
setting is measured alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from wholebatch.errors import WholebatchError
from wholebatch.memory.budget import bytes_said, free_memory
from wholebatch.tune.measure import Agreed, Running, Subject, TooSlow
from wholebatch.tune.settings import Setting, Trial, steps_of
from wholebatch.tune.space import Predicted
from wholebatch.tune.turns import Turns

__all__ = ["CLEARLY", "Bench", "Limits", "memory_of", "rate_of"]

_log = logging.getLogger("wholebatch")

CLEARLY = 0.9
"""Of the best speed: below it a setting is slower, whatever noise there is."""
HOPELESS = 3
"""Times the best window: longer, and the first one is enough."""
SURE = 5
"""Rounds in turn with the best, all of them clearly slower: more would say nothing else."""
CLOSE = 0.93
"""Of the best speed: above it a setting is measured again, all those in turn."""
TIED, AT_LEAST = 0.98, 0.95
"""Of the best speed: one above it that the rounds cannot tell from the best is as fast, if they
can tell that it is not slower than this."""
ROOM = 0.5
"""Of the free memory: so much may be taken by settings that are measured in turn."""

_FEW, _TURNS, _MANY = 6, 12, 60
"""Rounds of those that are close: where windows take long, as a rule, and where they do not."""


@dataclass(frozen=True)
class Limits:
    """How long things may take. `total`: no new setting is begun after so many seconds."""

    total: float = 300.0
    seconds: float = 1.0
    least: int = 3
    most: int = 30
    warm_up: float = 120.0


@dataclass(frozen=True)
class Speed:
    """What the windows of one setting said."""

    seconds: float
    rate: float
    windows: int
    is_stopped: bool


@dataclass
class Bench:
    """Where settings are measured; what was found is in `trials`."""

    subject: Subject
    samples: int
    predicted: Predicted
    budget: int
    limits: Limits
    now: Callable[[], float] = time.perf_counter
    trials: dict[Setting, Trial] = field(default_factory=dict)
    tied: set[Setting] = field(default_factory=set)
    """Those that the last rounds could not tell from the fastest."""

    def __post_init__(self) -> None:
        self._lead: Running | None = None  # the fastest so far, kept to be measured against

    @property
    def best(self) -> Trial | None:
        """The fastest so far."""
        measured = [trial for trial in self.trials.values() if trial.is_measured]
        return max(measured, key=lambda t: t.units_per_second or 0.0, default=None)

    def tried(self, setting: Setting, *, stops: bool) -> Trial:
        """One setting: `stops` as soon as it is clearly slower than the best."""
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
            if running.train.recoveries:  # a smaller micro-batch than this one went through
                return blank.with_(why="ran out of memory")
            if (otherwise := running.fell_back()) is not None:
                return blank.with_(why=otherwise[:200])
            # What is not to be taken need not be known so well.
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
        """Beside the fastest so far, whose speed is known."""
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
        """The fastest so far, ready for windows; None where it cannot be held beside this one."""
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
        """Whether others use the device too: a GPU is the run's own."""
        return self.predicted.device.type == "cpu"

    def _has_room(self, *settings: Setting | Trial) -> bool:
        """Whether all of these can be held at once, on every rank."""
        known = self.best
        largest = 0 if known is None else memory_of(known)
        wanted = 0
        for one in settings:
            need = memory_of(one) if isinstance(one, Trial) else self.predicted.need(one)
            wanted += need or largest
        missing = wanted - ROOM * free_memory(self.predicted.device)
        return Agreed(self.predicted.device)(missing) <= 0

    def _leads(self, running: Running, speed: Speed) -> bool:
        """Keep this one where it is the fastest so far."""
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
        """Seconds for a first window, which may have something to do that others have not."""
        best = self.best
        if best is None or best.seconds is None:
            return None
        usual = best.seconds
        if partner is not None:  # as long as it takes now, by the clock that a first window is read
            began = self.now()
            partner.window()
            usual = max(usual, self.since(began))
        return max(HOPELESS * usual, usual + 2.0)

    def again(self) -> None:
        """Measure the best and those close to it once more, one window of each in turn.

        Ways that must be compiled first are not made again for it.
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
        """Seconds since then, on the rank that is latest."""
        return Agreed(self.predicted.device)(self.now() - moment)


def _split_of(running: Running) -> dict[str, float]:
    """The split, which is evidence: a profiler that does not work here costs no setting."""
    try:
        return running.split()
    except (RuntimeError, AttributeError) as error:
        _log.warning("where the time of a window goes could not be measured: %s", error)
        return {}


def rate_of(trial: Trial) -> float:
    """Units per second; 0 where there is none."""
    return trial.units_per_second or 0.0


def memory_of(trial: Trial) -> int:
    """The peak, as measured, else as predicted."""
    return trial.peak or trial.predicted or 0
