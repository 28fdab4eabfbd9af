"""One setting, run for a few windows: how long, how much memory, and where the time goes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode

from wholebatch.engine import WholeBatch
from wholebatch.memory.checkpointing import with_checkpoints
from wholebatch.memory.meter import MemoryMeter, peak_with_recordings
from wholebatch.step import Step
from wholebatch.tune.clock import Clock
from wholebatch.tune.settings import Setting
from wholebatch.tune.split import Stamps, additions, split_of

__all__ = ["Agreed", "Running", "Subject", "Timing", "TooSlow"]

Make = Callable[[], "tuple[nn.Module, torch.optim.Optimizer]"]


@dataclass(frozen=True)
class Subject:
    """What is tuned: how to make it anew, its loss, and where its batches come from."""

    make: Make
    loss: Callable[[Any, Any], Any]
    batches: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Given to every `WholeBatch`: `units`, `clip_norm`, `batchnorm`, `static`, …"""
    clock: Callable[[], float] = time.perf_counter
    """What windows are timed by."""

    def fetch(self) -> tuple[Any, float]:
        """The next batch, and the seconds that it took."""
        began = self.clock()
        batch = self.batches()
        return batch, self.clock() - began


@dataclass(frozen=True)
class Timing:
    """Windows that were timed: seconds and units of each.

    What else a machine does only ever takes time away, so the faster half of the windows says what
    a setting can do, and their median what it usually does.
    """

    windows: list[tuple[float, float]] = field(default_factory=list)

    def add(self, seconds: float, units: float) -> None:
        """One more window."""
        self.windows.append((seconds, units))

    @property
    def spent(self) -> float:
        """Seconds in all."""
        return sum(seconds for seconds, _ in self.windows)

    @property
    def fastest(self) -> float:
        """Units per second of the fastest window."""
        return max(units / seconds for seconds, units in self.windows)

    @property
    def rate(self) -> float:
        """Units per second: the median of the faster half."""
        rates = sorted((units / seconds for seconds, units in self.windows), reverse=True)
        return statistics.median(rates[: -(-len(rates) // 2)])

    @property
    def seconds(self) -> float:
        """Of a window, at that rate."""
        return statistics.fmean(units for _, units in self.windows) / self.rate


class TooSlow(Exception):
    """One window is enough to know."""


class Agreed:
    """The slowest rank's clock: what ranks decide by must be the same on all of them."""

    def __init__(self, device: torch.device) -> None:
        dist = torch.distributed
        self._device = device
        self._many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def __call__(self, seconds: float) -> float:
        if not self._many:
            return seconds
        here = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(here, op=torch.distributed.ReduceOp.MAX)
        return float(here)


class Running:
    """A model made anew under one setting, ready to make windows."""

    def __init__(self, subject: Subject, setting: Setting) -> None:
        self._subject = subject
        self.setting = setting
        self.model, self.optimizer = subject.make()
        inner = getattr(self.model, "module", self.model)
        if setting.way.checkpointing:
            with_checkpoints(inner)
        self.device = next(self.model.parameters()).device
        self._meter: MemoryMeter | None = None
        self._stamps: Stamps | None = None
        # A graph is made of the user's own function: there nothing is put around it.
        self._is_eager = setting.way.execute == "eager"
        self.train = WholeBatch(
            self.model,
            self.optimizer,
            loss=self._loss if self._is_eager else subject.loss,
            micro_batch=setting.micro_batch,
            precision=setting.way.precision,
            execute=setting.way.execute,  # type: ignore[arg-type]
            sync=setting.way.sync,
            nonfinite="skip",
            **subject.options,
        )
        self.agreed = Agreed(self.device)

    def _loss(self, model: Any, micro: Any) -> Any:
        if self._meter is not None and self._meter not in _get_current_dispatch_mode_stack():
            _push_mode(self._meter)  # lock-step runs each micro-batch in a thread of its own
        if self._stamps is None:
            return self._subject.loss(model, micro)
        self._stamps.mark("forward")
        result = self._subject.loss(model, micro)
        self._stamps.mark("backward")
        return result

    def window(self) -> tuple[float, Step]:
        """One window, with the fetching of its batch: its seconds, the slowest rank's."""
        return self.window_of(*self._subject.fetch())

    def window_of(self, batch: Any, fetched: float) -> tuple[float, Step]:
        """The window of this batch, which took `fetched` seconds to come; with them."""
        began = self._subject.clock()
        step = self.train.step(batch)
        self._wait()
        return self.agreed(fetched + self._subject.clock() - began), step

    def warm_up(self, *, most: float, patience: float | None = None) -> None:
        """Until windows take what they take: caches are warm, graphs are made and recorded.

        TooSlow when eager code takes more than `patience` seconds for one window; between two of
        its micro-batches already.
        """
        watched = patience if self._is_eager else None
        seconds = self._first_window(watched)
        if watched is not None and seconds > watched:
            raise TooSlow
        if self._is_eager and self.device.type == "cpu":
            return
        last, spent = self.window()[0], 0.0
        while spent < most:
            seconds = self.window()[0]
            spent += seconds
            if seconds > 0.9 * last:
                break
            last = seconds

    def _first_window(self, patience: float | None) -> float:
        began = time.perf_counter()

        def after_micro(done: int, of: int) -> None:
            if patience is not None and done < of and time.perf_counter() - began > patience:
                raise TooSlow

        alone = self.train._window.sync.ranks == 1  # ranks leave a window together or not at all
        self.train.step(self._subject.batches(), after_micro=after_micro if alone else None)
        self._wait()
        return self.agreed(time.perf_counter() - began)

    def timed(
        self, *, least: int, seconds: float, most: int, too_slow: float | None = None
    ) -> Timing:
        """At least `least` windows and `seconds`; fewer where units per second fall `too_slow`."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        timing = Timing()
        while (made := len(timing.windows)) < most and (made < least or timing.spent < seconds):
            spent, step = self.window()
            timing.add(spent, step.units)
            # Two of them: one may have met with something else that the machine was doing.
            if too_slow is not None and made >= 1 and timing.fastest < too_slow:
                break
        return timing

    def fell_back(self) -> str | None:
        """Why micro-steps run otherwise than this setting says; None where they do not."""
        executor = self.train._feeding.executor
        if self._is_eager or executor.mode not in ("eager", "compiled forward"):
            return None
        if self.train._feeding.needs_lock_step():
            return None  # which records its windows in a way of its own
        said = executor.notes.history
        return said[-1] if said else f"micro-steps run {executor.mode}"

    def peak(self) -> int:
        """The most bytes of tensors in a window: CUDA's own count, elsewhere that of a meter."""
        if self.device.type == "cuda":
            return peak_with_recordings(self.device)
        with MemoryMeter(model=self.model, optimizer=self.optimizer) as meter:
            self._meter = meter
            try:
                self.train.step(self._subject.batches())
            finally:
                self._meter = None
        return meter.peak

    def update_bytes(self) -> int:
        """What an update reads and writes: parameters, gradients, the optimizer's state."""
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
        """Seconds of a window by part, the mean of a few."""
        clock = Clock(self.device, self._subject.clock)
        last = self.train.last_step
        steps = 1 if last is None else last.micro_batches
        in_lock_step = steps > 1 and self.train._feeding.needs_lock_step()
        is_told_apart = self._is_eager and not in_lock_step
        parts: list[dict[str, float]] = []
        with clock.watching() as busy:
            for _ in range(windows):
                stamps = Stamps(clock, tells_apart=is_told_apart)
                self._stamps = stamps if is_told_apart else None
                try:
                    stamps.mark("data")
                    batch = self._subject.batches()
                    stamps.mark("start")
                    self.train.step(batch, after_micro=stamps.after_micro)
                    stamps.mark("end")
                finally:
                    self._stamps = None
                parts.append(split_of(stamps, ranks=self.train._window.sync.ranks))
        mean = {name: statistics.fmean(part[name] for part in parts) for name in parts[0]}
        mean = additions(mean, self.optimizer, clock, times=steps - int(self._is_eager))
        return busy.taken_out(mean)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Give everything back before the next one is made."""
        del self.train, self.model, self.optimizer
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
