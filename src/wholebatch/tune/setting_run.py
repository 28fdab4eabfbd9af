"""One setting, run for a few windows: its time, its memory, and the split of its time."""

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

from wholebatch.core.options import grouped
from wholebatch.core.whole_batch import WholeBatch
from wholebatch.core.window import Step
from wholebatch.memory.activation_checkpointing import with_checkpoints
from wholebatch.memory.meter import MemoryMeter, peak_with_recordings
from wholebatch.tune.device_clock import Clock
from wholebatch.tune.settings import Setting
from wholebatch.tune.time_split import Stamps, additions, split_of

__all__ = ["Agreed", "Running", "Subject", "Timing", "TooSlow"]

Make = Callable[[], "tuple[nn.Module, torch.optim.Optimizer]"]


@dataclass(frozen=True)
class Subject:
    """The subject of a tuning: how to make it, its loss, and the source of its batches."""

    make: Make
    loss: Callable[[Any, Any], Any]
    batches: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options for every `WholeBatch`, such as `units`, `clip_norm`, `batchnorm` and `static`."""
    clock: Callable[[], float] = time.perf_counter
    """The clock that times windows."""

    def fetch(self) -> tuple[Any, float]:
        """Return the next batch, and the seconds that it took."""
        began = self.clock()
        batch = self.batches()
        return batch, self.clock() - began


@dataclass(frozen=True)
class Timing:
    """The timed windows: seconds and units of each.

    Other work on a machine can only slow a window down. So the faster half of the windows shows
    what a setting can do, and their median is its usual speed.
    """

    windows: list[tuple[float, float]] = field(default_factory=list)

    def add(self, seconds: float, units: float) -> None:
        """Add one window."""
        self.windows.append((seconds, units))

    @property
    def spent(self) -> float:
        """Return the total seconds."""
        return sum(seconds for seconds, _ in self.windows)

    @property
    def fastest(self) -> float:
        """Return the units per second of the fastest window."""
        return max(units / seconds for seconds, units in self.windows)

    @property
    def rate(self) -> float:
        """Return the units per second: the median of the faster half."""
        rates = sorted((units / seconds for seconds, units in self.windows), reverse=True)
        return statistics.median(rates[: -(-len(rates) // 2)])

    @property
    def seconds(self) -> float:
        """Return the seconds of a window at that rate."""
        return statistics.fmean(units for _, units in self.windows) / self.rate


class TooSlow(Exception):
    """Raised if the first window shows that a setting is too slow."""


class Agreed:
    """The maximum over all ranks: decisions must be the same on all of them."""

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
    """A newly made model under one setting, ready to run windows."""

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
        # A graph is made of the user's own function, so nothing may wrap it.
        self._is_eager = setting.way.execute == "eager"
        self.train = WholeBatch(
            self.model,
            self.optimizer,
            loss=self._loss if self._is_eager else subject.loss,
            precision=setting.way.precision,
            execute=setting.way.execute,  # type: ignore[arg-type]
            **grouped(
                {
                    **subject.options,
                    "micro_batch": setting.micro_batch,
                    "sync": setting.way.sync,
                    "nonfinite": "skip",
                }
            ),
        )
        self.agreed = Agreed(self.device)

    def _loss(self, model: Any, micro: Any) -> Any:
        if self._meter is not None and self._meter not in _get_current_dispatch_mode_stack():
            _push_mode(self._meter)  # Lock-step runs each micro-batch in its own thread.
        if self._stamps is None:
            return self._subject.loss(model, micro)
        self._stamps.mark("forward")
        result = self._subject.loss(model, micro)
        self._stamps.mark("backward")
        return result

    def window(self) -> tuple[float, Step]:
        """Run one window, including fetching its batch; return the seconds of the slowest rank."""
        return self.window_of(*self._subject.fetch())

    def window_of(self, batch: Any, fetched: float) -> tuple[float, Step]:
        """Run a window of this batch; the seconds include the `fetched` ones."""
        began = self._subject.clock()
        step = self.train.step(batch)
        self._wait()
        return self.agreed(fetched + self._subject.clock() - began), step

    def warm_up(self, *, most: float, patience: float | None = None) -> None:
        """Run windows until their time settles: caches are warm, graphs are made and captured.

        Raise TooSlow if eager code takes more than `patience` seconds for one window. This is
        checked between its micro-batches too.
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

        alone = self.train._window.sync.ranks == 1  # Ranks leave a window together or not at all.
        self.train.step(self._subject.batches(), after_micro=after_micro if alone else None)
        self._wait()
        return self.agreed(time.perf_counter() - began)

    def timed(
        self, *, least: int, seconds: float, most: int, too_slow: float | None = None
    ) -> Timing:
        """Time at least `least` windows and `seconds`; stop early if the rate is `too_slow`."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        timing = Timing()
        while (made := len(timing.windows)) < most and (made < least or timing.spent < seconds):
            spent, step = self.window()
            timing.add(spent, step.units)
            # Two windows: one alone may have met other work on the machine.
            if too_slow is not None and made >= 1 and timing.fastest < too_slow:
                break
        return timing

    def fell_back(self) -> str | None:
        """Return why micro-steps do not run as this setting asks, or None if they do."""
        executor = self.train._runner.executor
        if self._is_eager or executor.mode not in ("eager", "compiled forward"):
            return None
        if self.train._runner.needs_lock_step():
            return None  # Lock-step captures its windows in its own way.
        said = executor.notes.history
        return said[-1] if said else f"micro-steps run {executor.mode}"

    def peak(self) -> int:
        """Return the peak bytes of tensors in a window, counted by CUDA or by a meter."""
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
        clock = Clock(self.device, self._subject.clock)
        last = self.train.last_step
        steps = 1 if last is None else last.micro_batches
        in_lock_step = steps > 1 and self.train._runner.needs_lock_step()
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
        """Release everything before the next setting is made."""
        del self.train, self.model, self.optimizer
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
