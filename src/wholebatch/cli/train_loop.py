"""The loop of a run: take a batch, make the update, record it; until done, or asked to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from wholebatch.batch import batch_size_of
from wholebatch.cli.checkpoints import Checkpoints
from wholebatch.cli.recipes.recipe_batches import Nothing
from wholebatch.cli.report.metrics_writers import Events, MetricsFile, Sink, WandbRun, record_of
from wholebatch.cli.report.terminal_output import Terminal
from wholebatch.cli.run_checkpoint import save_run
from wholebatch.cli.run_folder import RunFolder
from wholebatch.cli.stop_signal import StopRequest
from wholebatch.cli.training_run import Session
from wholebatch.cli.validation import evaluate, is_due
from wholebatch.errors import StateError, WindowError
from wholebatch.plain_files import read_json
from wholebatch.window.noise_scale import NoiseScale
from wholebatch.window.window import Step

_MOST_SKIPPED_IN_A_ROW = 50
_MOST_SPIKES_TOLD = 5
_LOOKED_AT, _SLOW_DATA = 20, 0.25
"""After so many windows, data that takes more than this share of the time is reported."""


def run_loop(session: Session, folder: RunFolder, terminal: Terminal) -> TrainingLoop:
    """Train up to the configured number of updates, or until a signal asks to stop."""
    with ExitStack() as stack:
        sinks = open_sinks(stack, session, folder)
        stop = stack.enter_context(StopRequest(after="window", told=session.world.is_first))
        terminal.begin(done=session.progress, total=session.config.steps)
        stack.callback(terminal.end)
        loop = TrainingLoop(session, folder, terminal, sinks, stop)
        began = time.perf_counter()
        loop.run()
        loop.seconds = time.perf_counter() - began
        return loop


@dataclass(eq=False)
class TrainingLoop:
    """The loop of a run, and what it has come to."""

    session: Session
    folder: RunFolder
    terminal: Terminal
    sinks: Sequence[Sink]  # of the first rank
    stop: StopRequest
    finished: bool = False
    """True if it made all updates; else it was stopped between two windows."""
    checkpoint: Path = Path()
    seconds: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    largest: tuple[int, Any] = (0, None)
    """The size of a full batch, and the batch: how much memory it would need at once is asked."""
    _units: float = 0.0
    _seconds: float = 0.0
    _metered: bool = True
    _has_made_a_window: bool = False
    _skipped_in_a_row: int = 0
    _reading: float = 0.0  # seconds of the windows since the meter was off
    _windows: int = 0

    def __post_init__(self) -> None:
        self._checkpoints = Checkpoints(self.folder.checkpoints)
        self._memory = self.session.memory
        self._noise: NoiseScale | None = self.session.train.noise
        for sink in self.sinks:
            if isinstance(sink, MetricsFile):  # of a run that is resumed
                self._note_losses(sink.first, sink.last)
                if sink.lost:
                    self.terminal.note(
                        f"note: {sink.path.name} does not have windows 1 to {sink.lost}"
                    )

    def run(self) -> None:
        """Make the updates; the last thing that is written is a checkpoint."""
        session = self.session
        is_new = session.world.first(lambda: not self._checkpoints.paths())
        is_saved = is_new and self._save()
        while session.progress < session.config.steps:
            if session.world.any(self.stop.requested):
                self._save()
                return
            began = time.perf_counter()
            batch = session.batches.peek()
            reading = time.perf_counter() - began
            session.position = session.batches.position
            rates = session.pace.begin(samples=session.batches.samples)
            session.batches.take()
            if session.world.ranks == 1:
                self._remember(batch)
            self._window(batch, rates)
            self._watch_data(reading)
            is_saved = session.train.updates % session.config.checkpoint_every == 0 and self._save()
        self.finished = bool(is_saved or self._save())

    def _window(self, batch: Any, rates: list[float]) -> None:
        session = self.session
        metered = not self._memory.settled
        began = time.perf_counter()
        with self._memory.around(full_batch=self._is_full(batch)):
            if isinstance(batch, Nothing):
                step = session.train.join(batch.like)
            else:
                step = session.train.step(batch)
        seconds = time.perf_counter() - began
        if self._metered and not metered:
            self._units = self._seconds = 0.0  # the meter is slow: count from here on
        self._metered = metered
        if not self._has_made_a_window:
            self._has_made_a_window = True
            session.world.first_window_made(seconds)
        self._units += step.units
        self._seconds += seconds
        record = record_of(
            step,
            window=session.windows,
            epoch=session.position.epoch,
            lr=rates,
            now=time.time(),
            more={**self._more(), **self._spike(step)},
        )
        session.pace.end(step, session.train.noise)
        self._write(record)
        self._note_losses(record, record)
        session.position = session.batches.position
        self.terminal.update(
            updates=session.progress,
            loss=step.loss,
            units_per_second=self.units_per_second,
            doing=getattr(session.train, "compiling", None),
        )
        self._watch_skipped(step.skipped)

    def _more(self) -> dict[str, Any]:
        """Return what a window has to record beside its step."""
        session, train = self.session, self.session.train
        found: dict[str, Any] = {"skipped_windows": train.skipped}
        if session.pace.changes:
            found["batch_size"] = session.batches.batch_size
        noise = train.noise
        if noise is not None and noise != self._noise:
            self._noise = noise
            found.update(
                noise_scale=_rounded(noise.critical),
                noise_low=_rounded(noise.low),
                noise_high=_rounded(noise.high),
                advice=noise.verdict,
            )
        if is_due(session):
            found["validation_loss"] = self.validation_loss = evaluate(session)
            self.terminal.note(
                f"update {train.updates}: validation loss {self.validation_loss:.4f}"
            )
        found["memory"] = session.memory.measured
        found["recoveries"] = train.recoveries
        return found

    def _spike(self, step: Step) -> dict[str, Any]:
        """Tell of a loss far above those before it; the record marks it."""
        spikes = self.session.spikes
        found = spikes.see(step.loss) if step.skipped is None else None
        if found is None:
            return {}
        if spikes.count <= _MOST_SPIKES_TOLD:
            self.terminal.note(f"update {step.update}: {found}")
        return {"spike": True}

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            for sink in self.sinks:
                sink.write(record)
        except StateError:
            self.folder.check_there()  # the better reason
            raise

    def _note_losses(self, first: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> None:
        if self.first_loss is None and first is not None:
            self.first_loss = first["loss"]
        if last is not None:
            self.last_loss = last["loss"]

    def _save(self) -> bool:
        if self.session.world.is_first:
            self.folder.check_there()
        for sink in self.sinks:
            sink.sync()
        self.checkpoint = save_run(self.session, self._checkpoints)
        return True

    def _watch_skipped(self, reason: str | None) -> None:
        if reason is None:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        self.terminal.note(f"window {self.session.windows} made no update: {reason}")
        if self._skipped_in_a_row == _MOST_SKIPPED_IN_A_ROW:
            raise WindowError(
                f"{_MOST_SKIPPED_IN_A_ROW} windows in a row made no update ({reason}); the run "
                "would never end"
            )

    def _watch_data(self, reading: float) -> None:
        """Warn once if reading data takes much of the time; `reading` is that of this window."""
        if self._metered:
            return
        self._reading += reading
        self._windows += 1
        share = self._reading / max(1e-9, self._reading + self._seconds)
        if self._windows == _LOOKED_AT and share > _SLOW_DATA:
            workers = self.session.config.workers
            self.terminal.note(
                f"note: {share:.0%} of the time goes into reading data; "
                + (f"--workers {max(4, 2 * workers)} reads ahead in more processes")
            )

    def _remember(self, batch: Any) -> None:
        """Keep a full batch: how much memory it would have needed at once is asked at the end."""
        if self.largest[0] < self.session.config.batch_size:
            size = batch_size_of(batch)
            if size > self.largest[0]:
                self.largest = (size, batch)

    def _is_full(self, batch: Any) -> bool:
        if self._memory.settled or isinstance(batch, Nothing):
            return True
        world, wanted = self.session.world, self.session.batches.batch_size
        return world.ranks > 1 or batch_size_of(batch) >= wanted

    @property
    def units_per_second(self) -> float:
        return self._units / self._seconds if self._seconds else 0.0


def open_sinks(stack: ExitStack, session: Session, folder: RunFolder) -> list[Sink]:
    """Return the writers of the first rank's records, `metrics.jsonl` first; none on others.

    TensorBoard's events are written where it is installed: the extra `tensorboard`.
    """
    if not session.world.is_first:
        return []
    windows, project = session.windows, session.config.wandb
    sinks: list[Sink] = [stack.enter_context(closing(MetricsFile(folder.metrics, windows=windows)))]
    if find_spec("tensorboard") is not None:
        sinks.append(stack.enter_context(closing(Events(folder.events, windows=windows))))
    if project is not None:
        manifest = read_json(folder.manifest)
        run = WandbRun(project, folder=folder.path, manifest=manifest, resumed=windows > 0)
        sinks.append(stack.enter_context(closing(run)))
    return sinks


def _rounded(value: float) -> float:
    """Return a number to six digits: it is not known better."""
    return float(f"{value:.6g}") if math.isfinite(value) else value
