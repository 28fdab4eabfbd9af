"""The training loop of a run: read a batch, update, record, until done or stopped."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from wholebatch.batch import batch_size_of
from wholebatch.cli.checkpoints import Checkpoints
from wholebatch.cli.metrics import Metrics, record_of
from wholebatch.cli.recipes.recipe_batches import EmptyShare
from wholebatch.cli.report.terminal_output import Terminal
from wholebatch.cli.run_watch import RunWatch
from wholebatch.cli.stop_signal import StopRequest
from wholebatch.cli.training_run import TrainingRun
from wholebatch.errors import NonFiniteError, WholebatchError, WindowError
from wholebatch.memory.predict import predict_peak
from wholebatch.tune.task import measured_peak
from wholebatch.window.window import Step

_MOST_SKIPPED_IN_A_ROW = 50
_METERED = 3
"""The window whose memory is measured: the optimizer has its state, the first test is over."""


@dataclass(eq=False)
class TrainingLoop:
    """The loop of a run, and what it has come to."""

    run: TrainingRun
    checkpoints: Checkpoints
    metrics: Metrics | None  # of the first rank
    terminal: Terminal
    stop: StopRequest
    finished: bool = False
    """True if it made all updates; else it was asked to stop."""
    checkpoint: Path | None = None
    """The newest one: written by this loop, or resumed from."""
    first_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    peak: int | None = None
    undivided: int | None = None
    """The peak that is predicted for the whole batch at once."""
    units: float = 0.0
    seconds: float = 0.0
    batchnorm_saw: list[int] = field(default_factory=list)
    """Of each window, the samples that a BatchNorm saw, where that was not the whole batch."""
    most_micro_batches: int = 1
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=16))  # seconds of windows
    _largest: Any = None  # the largest batch of this process
    _windows: int = 0  # of this process
    _skipped_in_a_row: int = 0
    watch: RunWatch = field(default_factory=RunWatch)

    def updates(self) -> None:
        """Make the updates, and write a checkpoint at the end."""
        run, config = self.run, self.run.config
        if self.metrics is not None and self.metrics.first is not None:
            self.first_loss = self.metrics.first["loss"]
        while run.train.updates < config.updates:
            if run.world.any(self.stop.requested):
                self._save()
                return
            step = self._window()
            if self._windows == 1:
                run.world.first_window_made(self.seconds)
            self._watch_skipped(step)
            if step.skipped is None and run.train.updates % config.checkpoint_every == 0:
                self._save()
        self._save()
        self.finished = True

    def _window(self) -> Step:
        run, began = self.run, time.perf_counter()
        batch = run.batches.take()
        epoch = run.batches.position.epoch  # the next batch may begin another one
        rates = [float(group["lr"]) for group in run.optimizer.param_groups]
        try:
            step = self._step(batch)
        except NonFiniteError as error:
            what = str(error).partition("; pass close=")[0]
            raise NonFiniteError(
                f"{what}; try a lower --lr, a longer --warmup or --clip-norm"
            ) from error
        seconds = time.perf_counter() - began
        is_slowed = self._windows == _METERED and run.world.device.type == "cpu"  # by the meter
        speed = None if is_slowed else step.units / seconds
        if not is_slowed:
            self.units, self.seconds = self.units + step.units, self.seconds + seconds
            self._recent.append(seconds)
        record = record_of(step, window=run.windows, epoch=epoch, rates=rates)
        if self._validates(step):
            record["validation_loss"] = self.validation_loss = run.evaluate()
            self.terminal.note(f"update {step.update}: validation loss {self.validation_loss:.4f}")
        self.most_micro_batches = max(self.most_micro_batches, step.micro_batches)
        samples = 0 if isinstance(batch, EmptyShare) else batch_size_of(batch)
        if (seen := run.batchnorm_sees(samples, step.micro_batches)) and samples:
            record["batchnorm_saw"] = seen
            self.batchnorm_saw.append(seen)
        record |= {
            "seconds": round(seconds, 6),
            "units_per_second": None if speed is None else round(speed, 3),
            "time": round(time.time(), 3),
            "memory": self.peak,
            "undivided_memory": self.undivided,
            "recoveries": run.train.recoveries,
        }
        if self.metrics is not None:
            self.metrics.write(record)
        if step.skipped is None:
            self.first_loss = step.loss if self.first_loss is None else self.first_loss
            self.last_loss = step.loss
        done, total = run.train.updates, run.config.updates
        left = median(self._recent) * (total - done) if self._recent else None
        self.terminal.update(updates=done, loss=step.loss, units_per_second=speed, left=left)
        for note in self.watch.notes(step):
            self.terminal.note(f"warning: {note}")
        return step

    def _step(self, batch: Any) -> Step:
        run = self.run
        self._windows += 1
        if isinstance(batch, EmptyShare):
            return run.train.join(batch.like)
        if run.world.ranks > 1:
            return run.train.step(batch)
        if self._largest is None or batch_size_of(self._largest) < batch_size_of(batch):
            self._largest = batch
        left = run.config.updates - run.train.updates
        if self._windows < _METERED and left > 1:
            return run.train.step(batch)
        if self.peak is not None and run.world.device.type == "cpu":
            return run.train.step(batch)
        steps: list[Step] = []
        peak = measured_peak(lambda: steps.append(run.train.step(batch)), run.model, run.optimizer)
        if self.peak is None:
            self.undivided = self._predict_undivided()
        self.peak = max(peak, self.peak or 0)
        return steps[0]

    def _validates(self, step: Step) -> bool:
        """True after every `--validate` updates, and after the last one."""
        every, updates = self.run.config.validate, self.run.train.updates
        if not self.run.recipe.has_validation or step.skipped is not None:
            return False
        return updates == self.run.config.updates or (every is not None and updates % every == 0)

    def _save(self) -> None:
        windows = self.run.windows
        if self.checkpoint is not None and self.checkpoint.name.endswith(f"-{windows:08d}"):
            return
        if self.metrics is not None:
            self.metrics.sync()
        self.checkpoint = self.checkpoints.save(self.run.state_dict(), windows=windows)

    def _watch_skipped(self, step: Step) -> None:
        if step.skipped is None:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        self.terminal.note(f"window {self.run.windows} made no update: {step.skipped}")
        if self._skipped_in_a_row == _MOST_SKIPPED_IN_A_ROW:
            raise WindowError(
                f"{_MOST_SKIPPED_IN_A_ROW} windows in a row made no update ({step.skipped}); the "
                "run would never end"
            )

    def _predict_undivided(self) -> int | None:
        """Return the peak of the largest batch so far in one piece; None if it is not known."""
        run = self.run
        try:
            return predict_peak(
                run.model,
                run.recipe.loss,
                self._largest,
                optimizer=run.optimizer,
                precision=run.config.autocast,
                micro_batches=1,
            ).peak
        except (WholebatchError, RuntimeError, TypeError, ValueError):
            return None
