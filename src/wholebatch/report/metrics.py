"""One line of JSON per window, and the same numbers for TensorBoard.

`metrics.jsonl` has each window exactly once, also after a kill and a resume: what lies beyond the
checkpoint is cut off before going on, and lines are on the disk before the checkpoint that counts
them. Fields that two identical runs do not share are in `TIMING`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholebatch.errors import MissingExtraError, StateError
from wholebatch.step import Step

__all__ = ["TIMING", "Events", "MetricsFile", "record_of"]

TIMING = frozenset({"seconds", "units_per_second", "time"})
"""The fields of a record that say when and how fast, not what."""


def record_of(
    step: Step, *, window: int, epoch: int, lr: list[float], now: float
) -> dict[str, Any]:
    """What is written of one window. `update` counts updates, `window` also those skipped."""
    record: dict[str, Any] = {
        "window": window,
        "update": step.update,
        "epoch": epoch,
        "loss": step.loss,
        "units": step.units,
        "grad_norm": step.grad_norm,
        "clip": step.clip,
        "lr": lr[0] if len(set(lr)) == 1 else lr,
        "micro_batches": step.micro_batches,
        "loss_scale": step.loss_scale,
        "skipped": step.skipped,
    }
    if step.terms:
        record["terms"] = dict(step.terms)
    record["seconds"] = round(step.seconds, 6)
    record["units_per_second"] = round(step.units / step.seconds, 3) if step.seconds > 0 else None
    record["time"] = round(now, 3)
    return record


class MetricsFile:
    """`metrics.jsonl`, opened to go on after `windows` windows; later lines are cut off."""

    def __init__(self, path: Path, *, windows: int) -> None:
        self.path = path
        self.first: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        kept, size = self._read(windows)
        if kept != windows:
            raise StateError(
                f"{path} holds {kept} of the {windows} windows before the checkpoint; it was "
                "changed by something else: move it away, or put it back as it was"
            )
        self._file = path.open("ab")
        self._file.truncate(size)
        self._file.seek(size)

    def _read(self, windows: int) -> tuple[int, int]:
        """How many of the first windows there are, and where the last of them ends."""
        kept = size = 0
        if windows and self.path.exists():
            with self.path.open("rb") as file:
                for line in file:
                    try:
                        record = json.loads(line)
                        belongs = record["window"] == kept + 1 <= windows
                    except (ValueError, KeyError, TypeError):
                        belongs = False
                    if not belongs or not line.endswith(b"\n"):
                        break
                    kept += 1
                    size += len(line)
                    self.first = self.first or record
                    self.last = record
        return kept, size

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a line; it is with the operating system when this returns."""
        self._file.write(json.dumps(_finite(record), allow_nan=False).encode() + b"\n")
        self._file.flush()
        self.first = self.first or dict(record)
        self.last = dict(record)

    def sync(self) -> None:
        """Wait until every line is on the disk: called before a checkpoint counts them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Events:
    """TensorBoard's event files; after a resume, what lies beyond the checkpoint is hidden."""

    def __init__(self, folder: Path, *, windows: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "cli", "wholebatch train") from None
        self._writer: Any = SummaryWriter(
            str(folder), purge_step=windows + 1 if windows else None, flush_secs=10
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """The numbers of a record, by its window."""
        for name in ("loss", "grad_norm", "clip", "loss_scale", "units_per_second"):
            self._scalar(name, record[name], record["window"])
        rates = record["lr"] if isinstance(record["lr"], list) else [record["lr"]]
        for group, rate in enumerate(rates):
            self._scalar("lr" if len(rates) == 1 else f"lr/{group}", rate, record["window"])
        for name, value in record.get("terms", {}).items():
            self._scalar(f"terms/{name}", value, record["window"])

    def _scalar(self, name: str, value: float | None, window: int) -> None:
        if value is not None:
            self._writer.add_scalar(name, value, window)

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _finite(value: Any) -> Any:
    """JSON has no inf and nan: null, so that every reader can read every line."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
