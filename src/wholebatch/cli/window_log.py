"""What is written of every window, and to whom."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from wholebatch.cli.report.metrics_file import MetricsFile, Sink
from wholebatch.cli.report.tensorboard_events import Events
from wholebatch.cli.report.wandb_run import WandbRun
from wholebatch.cli.run_folder import RunFolder
from wholebatch.cli.training_run import Session
from wholebatch.core.json_files import read_json
from wholebatch.core.noise_scale import NoiseScale

__all__ = ["Watch", "open_sinks"]


def open_sinks(stack: ExitStack, session: Session, folder: RunFolder) -> list[Sink]:
    """Where the first rank's records go, `metrics.jsonl` first; nowhere on the others."""
    if not session.crew.is_first:
        return []
    sinks: list[Sink] = []

    def opened(sink: Sink) -> None:
        sinks.append(sink)
        stack.callback(sink.close)

    opened(MetricsFile(folder.metrics, windows=session.windows))
    opened(Events(folder.events, windows=session.windows))
    if session.config.wandb is not None:
        manifest = read_json(folder.manifest)
        opened(
            WandbRun(
                session.config.wandb,
                folder=folder.path,
                manifest=manifest,
                resumed=session.windows > 0,
            )
        )
    return sinks


class Watch:
    """Follows a session, and says of every window what its step does not."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waited = session.train.waited
        self._noise: NoiseScale | None = session.train.noise

    def more(self, *, seconds: float) -> dict[str, Any]:
        """Fields for `record_of`; `seconds` is how long the window took."""
        session, train = self._session, self._session.train
        found: dict[str, Any] = {"skipped_windows": train.skipped}
        if session.pace.schedule is not None:
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
        found["memory"] = session.memory.measured
        found["recoveries"] = train.recoveries
        waited = train.waited
        if waited is not None and self._waited is not None and seconds > 0:
            found["communication"] = round(min(1.0, (waited - self._waited) / seconds), 6)
        self._waited = waited
        return found


def _rounded(value: float) -> float:
    """Six digits: it is not known better."""
    return float(f"{value:.6g}") if math.isfinite(value) else value
