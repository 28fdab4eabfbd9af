"""The measurement of settings: one run of each, one after the other, and close ones in turn.

A CPU is shared with other work. There every setting is measured in turn with the fastest so far,
and its speed is that of the fastest times the ratio of their windows. A GPU belongs to the run
alone, so every setting is measured by itself.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from wholebatch.batch import to_device
from wholebatch.distributed.process_group import largest_over_ranks
from wholebatch.errors import WholebatchError
from wholebatch.memory.activation_checkpointing import with_checkpoints
from wholebatch.memory.budget import free_memory
from wholebatch.memory.meter import free_caches
from wholebatch.memory.plain_window import PlainWindow
from wholebatch.options import grouped
from wholebatch.readable_sizes import bytes_said
from wholebatch.tune.settings import Predicted, Setting, Trial
from wholebatch.tune.window_timing import (
    Clock,
    PeakMeter,
    Stamps,
    Turns,
    Workload,
    additions,
    refuse_nonfinite,
    settle,
    split_of,
    usual,
    wait_for,
)
from wholebatch.whole_batch import WholeBatch
from wholebatch.window.forward_state import replaced_attributes
from wholebatch.window.window import Step

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


class TooSlow(Exception):
    """Raised if the first window shows that a setting is too slow."""


class Running:
    """A newly made model under one setting, ready to run windows."""

    def __init__(self, workload: Workload, setting: Setting) -> None:
        self._workload = workload
        self.setting = setting
        self.model, self.optimizer = workload.make()
        mode = setting.mode
        if mode.checkpointing:
            with_checkpoints(getattr(self.model, "module", self.model))
        self.device = next(self.model.parameters()).device
        self._meter = PeakMeter(self.device)
        self._stamps: Stamps | None = None
        # A graph is made of the user's own function, so nothing may wrap it.
        self._is_eager = mode.execute == "eager"
        self.train = WholeBatch(
            self.model,
            self.optimizer,
            loss=self._loss if self._is_eager else workload.loss,
            precision=mode.precision,  # type: ignore[arg-type]
            execute=mode.execute,  # type: ignore[arg-type]
            **grouped(
                {
                    **workload.options,
                    "micro_batch": setting.micro_batch,
                    "sync": mode.sync,
                    "nonfinite": "skip",
                    **({} if mode.gradients == "device" else {"gradients": mode.gradients}),
                }
            ),
        )
        self._ranks = self.train._window.sync.ranks
        self._runner = self.train._runner
        self._runner.executor.notes.prints = False

    def _loss(self, model: Any, micro: Any) -> Any:
        self._meter.follow_thread()
        if self._stamps is None:
            return self._workload.loss(model, micro)
        self._stamps.mark("forward")
        result = self._workload.loss(model, micro)
        self._stamps.mark("backward")
        return result

    def window(self) -> tuple[float, Step]:
        """Run one window, including fetching its batch; return the seconds of the slowest rank."""
        return self.window_of(*self._workload.fetch())

    def window_of(self, batch: Any, fetched: float) -> tuple[float, Step]:
        """Run a window of this batch; the seconds include the `fetched` ones."""
        began = self._workload.clock()
        step = self.train.step(batch)
        wait_for(self.device)
        return largest_over_ranks(fetched + self._workload.clock() - began), step

    def warm_up(self, *, most: float, patience: float | None = None) -> None:
        """Run windows until their time settles.

        Raise TooSlow if eager code takes more than `patience` seconds for one window. This is
        checked between its micro-batches too.
        """
        watched = patience if self._is_eager else None
        seconds = self._first_window(watched)
        if watched is not None and seconds > watched:
            raise TooSlow
        if not (self._is_eager and self.device.type == "cpu"):
            settle(lambda: self.window()[0], most=most)
        self._meter.reset()

    def _first_window(self, patience: float | None) -> float:
        began = time.perf_counter()

        def after_micro(done: int, of: int) -> None:
            if patience is not None and done < of and time.perf_counter() - began > patience:
                raise TooSlow

        alone = self._ranks == 1  # Ranks leave a window together or not at all.
        after = after_micro if alone else None
        refuse_nonfinite(self.train.step(self._workload.batches(), after_micro=after).loss)
        wait_for(self.device)
        return largest_over_ranks(time.perf_counter() - began)

    def fell_back(self) -> str | None:
        """Return why micro-steps do not run as this setting asks, or None if they do."""
        executor = self._runner.executor
        if self._is_eager or executor.mode not in ("eager", "compiled forward"):
            return None
        notes = executor.notes.history
        return notes[-1] if notes else f"micro-steps run {executor.mode}"

    def peak(self) -> int:
        """Return the peak bytes of tensors in a window."""
        return self._meter.peak(
            lambda: self.train.step(self._workload.batches()), self.model, self.optimizer
        )

    def update_bytes(self) -> int:
        """Return the bytes of parameters, gradients and state that an update reads and writes."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = [
            value
            for p in parameters
            for value in self.optimizer.state.get(p, {}).values()
            if isinstance(value, torch.Tensor)
        ]
        trained = sum(int(p.nbytes) for p in parameters)
        return 3 * trained + 2 * sum(int(value.nbytes) for value in state)

    def split(self, *, windows: int = 2) -> dict[str, float]:
        """Return the seconds of a window by part, as the mean of a few windows."""
        clock = Clock(self.device, self._workload.clock)
        last = self.train.last_step
        steps = 1 if last is None else last.micro_batches
        parts: list[dict[str, float]] = []
        with clock.watching() as busy:
            for _ in range(windows):
                stamps = Stamps(clock, tells_apart=self._is_eager)
                with replaced_attributes(self, _stamps=stamps if self._is_eager else None):
                    stamps.mark("data")
                    batch = self._workload.batches()
                    stamps.mark("start")
                    self.train.step(batch, after_micro=stamps.after_micro)
                    stamps.mark("end")
                alone = None
                if self._ranks > 1 and steps == 1 and self._is_eager:
                    alone = self._backward_alone(batch)
                parts.append(split_of(stamps, ranks=self._ranks, alone=alone))
        mean = {name: statistics.fmean(part[name] for part in parts) for name in parts[0]}
        mean = additions(mean, self.optimizer, clock, times=steps - int(self._is_eager))
        return busy.taken_out(mean)

    def _backward_alone(self, batch: Any) -> float:
        """Return the seconds of a window's only backward without the reduction that it overlaps."""
        model, inner = self.model, getattr(self.model, "module", self.model)
        micro = to_device(batch, self.device)
        holding = getattr(model, "no_sync", nullcontext)
        with holding():
            plain = PlainWindow(inner, self._workload.loss, precision=self.setting.mode.precision)
            totals = plain.totals(micro)
            wait_for(self.device)
            began = self._workload.clock()
            torch.autograd.backward(totals)
            wait_for(self.device)
            seconds = self._workload.clock() - began
        model.zero_grad(set_to_none=True)
        return seconds

    def close(self) -> None:
        """Release everything before the next setting is made."""
        del self.train, self._runner, self.model, self.optimizer
        free_caches()


@dataclass
class SettingMeasurements:
    """Measures settings; `trials` holds the results."""

    workload: Workload
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
        measured = [trial for trial in self.trials.values() if trial.is_measured]
        return max(measured, key=rate_of, default=None)

    def blank(self, setting: Setting, *, status: str = "failed", why: str = "") -> Trial:
        found = self.predicted.of(setting)
        steps = -(-self.samples // setting.micro_batch)
        return Trial(setting, steps, status, why, predicted=None if found is None else found.peak)

    def measure(self, setting: Setting, *, stops: bool) -> Trial:
        """Measure one setting; with `stops`, end as soon as it is clearly slower than the best."""
        blank = self.blank(setting)
        partner = self._partner(setting)
        running: Running | None = None
        try:
            running = Running(self.workload, setting)
            running.warm_up(most=self.limits.warm_up, patience=self._patience(partner))
            found = self._timed(running, partner, blank, stops=stops)
            return self._result(running, found, blank)
        except TooSlow:
            why = f"stopped in its first window: more than {HOPELESS} times slower"
            return replace(blank, status="stopped", why=why, windows=1)
        except torch.OutOfMemoryError:
            return replace(blank, why="ran out of memory")
        except (WholebatchError, RuntimeError) as error:
            return replace(blank, why=str(error).strip().split("\n")[0][:200])
        finally:
            if running is not None and running is not self._lead:
                running.close()

    def _result(self, running: Running, found: Trial, blank: Trial) -> Trial:
        """Return the trial of a timed setting; keep it running if it is the fastest so far."""
        if running.train.recoveries:  # It ran with smaller micro-batches than this one.
            return replace(blank, why="ran out of memory")
        if (otherwise := running.fell_back()) is not None:
            return replace(blank, why=otherwise[:200])
        found = replace(found, update_bytes=running.update_bytes())
        if found.status == "stopped":  # A rejected setting need not be known as well.
            return found
        peak = running.peak()
        found = replace(found, peak=peak, split=_split_of(running))
        if peak > self.budget:
            return replace(
                found, why=f"needs {bytes_said(peak)}, more than {bytes_said(self.budget)}"
            )
        best = self.best
        if self._is_shared and (best is None or rate_of(found) > rate_of(best)):
            self._let_go()
            self._lead = running
        return replace(found, status="measured", why="measured")

    def _timed(
        self, running: Running, partner: Running | None, blank: Trial, *, stops: bool
    ) -> Trial:
        """Measure by itself, or in turn with the fastest so far, whose speed is known."""
        best, limits = self.best, self.limits
        turns = Turns(self.workload, [running] if partner is None else [partner, running])

        def is_slower() -> bool:
            if partner is not None:
                return turns.ratio(-1, 0).high < CLEARLY
            return turns.rates(-1)[0] < CLEARLY * rate_of(best)

        # Two windows at least: one alone may have met other work on the machine.
        sure = 2 if partner is None else SURE
        while (made := len(turns.rounds)) < limits.most and (
            made < limits.least or turns.spent(-1) < limits.seconds
        ):
            turns.round()
            if stops and made + 1 >= sure and is_slower():
                break
        windows = len(turns.rounds)
        if partner is None:
            rate = usual(turns.rates(-1))
            seconds = statistics.fmean(turns.units) / rate
        else:
            known, ratio = self.trials[partner.setting], turns.ratio(-1, 0).median
            assert known.seconds is not None
            seconds, rate = known.seconds / ratio, rate_of(known) * ratio
        found = replace(blank, seconds=seconds, units_per_second=rate, windows=windows)
        if stops and is_slower():
            why = f"stopped after {windows} windows: clearly slower"
            return replace(found, status="stopped", why=why)
        return found

    # ----------------------------------------------------------- the fastest so far

    def _partner(self, setting: Setting) -> Running | None:
        """Return the fastest so far, ready to run; None if it cannot be held beside this one."""
        best = self.best
        if best is None or not self._is_shared or not self._has_room(setting, best):
            self._let_go()
            return None
        if self._lead is None:
            self._lead = Running(self.workload, best.setting)
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
        return largest_over_ranks(missing) <= 0

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
        close = self._close_ones()
        if len(close) < 2:
            return
        turns = self._rounds(close)
        first = close[0]
        assert first.seconds is not None
        fastest = max(range(len(close)), key=lambda at: turns.ratio(at, 0).median)
        for at, trial in enumerate(close):
            ratio, beside = turns.ratio(at, 0).median, turns.ratio(at, fastest)
            if beside.median >= TIED and beside.low >= AT_LEAST and beside.high >= 1.0:
                self.tied.add(trial.setting)
            self.trials[trial.setting] = replace(
                trial,
                seconds=first.seconds / ratio,
                windows=trial.windows + len(turns.rounds),
                units_per_second=rate_of(first) * ratio,
                why="measured, and again in turn with the best",
            )

    def _close_ones(self) -> list[Trial]:
        """Return up to three trials about as fast as the best that fit in memory together."""
        best = self.best
        if best is None or not self._is_shared:
            return []
        close = [
            trial
            for trial in self.trials.values()
            if trial.is_measured
            and rate_of(trial) >= CLOSE * rate_of(best)
            and trial.setting.mode.execute == "eager"
        ]
        close = sorted(close, key=rate_of, reverse=True)[:3]
        while len(close) > 1 and not self._has_room(*close):
            close.pop()
        return close

    def _rounds(self, trials: list[Trial]) -> Turns:
        """Run the settings of these trials in turn, for as many rounds as the limits allow."""
        made: list[Running] = []
        with ExitStack() as stack:
            for trial in trials:
                made.append(Running(self.workload, trial.setting))
                stack.callback(made[-1].close)
                made[-1].window()
            turns = Turns(self.workload, made)
            began = self.now()
            for turn in range(_MANY):
                if turn >= _FEW and self.since(began) > 30 * self.limits.seconds:
                    break
                if turn >= _TURNS and turns.spent(0) > 2 * self.limits.seconds:
                    break
                turns.round()
            return turns

    def since(self, moment: float) -> float:
        """Return the seconds since then, on the slowest rank."""
        return largest_over_ranks(self.now() - moment)


def _split_of(running: Running) -> dict[str, float]:
    """Return the split, or {} if the profiler fails: that must not fail a setting."""
    try:
        return running.split()
    except (RuntimeError, AttributeError) as error:
        _log.warning("where the time of a window goes could not be measured: %s", error)
        return {}


def rate_of(trial: Trial | None) -> float:
    return 0.0 if trial is None else trial.units_per_second or 0.0


def memory_of(trial: Trial) -> int:
    """Return the peak as measured, else as predicted."""
    return trial.peak or trial.predicted or 0
