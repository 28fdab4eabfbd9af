"""The record of every window: `metrics.jsonl`, TensorBoard, Weights & Biases.

`metrics.jsonl` holds each window exactly once, also after a kill and a resume: lines beyond the
checkpoint are cut off before the run goes on, and lines are on disk before the checkpoint that
counts them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

from wholebatch.errors import MissingExtraError, OptionError, StateError
from wholebatch.plain_files import finite, reason
from wholebatch.window.window import Step


def record_of(step: Step, *, window: int, epoch: int, rates: list[float]) -> dict[str, Any]:
    """Return the record of one window. `update` counts updates, `window` also skipped ones."""
    names = ("update", "loss", "units", "grad_norm", "clip", "micro_batches", "loss_scale")
    record: dict[str, Any] = {"window": window, "epoch": epoch, "skipped": step.skipped}
    record |= {name: getattr(step, name) for name in names}
    record["lr"] = rates[0] if len(set(rates)) == 1 else rates
    if step.terms:
        record["terms"] = dict(step.terms)
    return record


class Metrics:
    """Writes the records of a run, from the first window after `windows` on."""

    def __init__(
        self, folder: Path, *, windows: int, wandb: str | None, settings: Mapping[str, Any]
    ) -> None:
        self.first: dict[str, Any] | None = None
        self._path, self._events = folder / "metrics.jsonl", folder / "tensorboard"
        self._writer: Any = None
        self._run: Any = None
        with _told(self._path):
            self._file = self._path.open("ab+")
        try:
            self._cut(windows)
            self._open_writers(folder, windows=windows, wandb=wandb, settings=settings)
        except BaseException:
            self.close()
            raise

    def _open_writers(
        self, folder: Path, *, windows: int, wandb: str | None, settings: Mapping[str, Any]
    ) -> None:
        """Open TensorBoard, where it is installed, and Weights & Biases, if asked for."""
        if find_spec("tensorboard") is not None:
            with _told(self._events), _without_tensorflow():
                from torch.utils.tensorboard import SummaryWriter

                purge = windows + 1 if windows else None  # hides windows beyond the checkpoint
                self._events.mkdir(exist_ok=True)
                self._writer = SummaryWriter(str(self._events), purge_step=purge)
        if wandb is not None:
            self._run = _wandb_run(wandb, folder, settings)

    def _cut(self, windows: int) -> None:
        """Keep the lines of the first windows; cut off what comes after."""
        size = 0
        with _told(self._path):
            self._file.seek(0)
            for line in self._file:
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    record = json.loads(line)
                    if record["window"] <= windows and line.endswith(b"\n"):
                        self.first = self.first or record
                        size += len(line)
                        continue
                break
            self._file.truncate(size)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; its line has reached the operating system when this returns."""
        self.first = self.first or dict(record)
        with _told(self._path):
            self._file.write(json.dumps(finite(record), allow_nan=False).encode() + b"\n")
            self._file.flush()
        numbers = scalars_of(record)
        if self._writer is not None:
            with _told(self._events):
                for name, value in numbers.items():
                    self._writer.add_scalar(name, value, record["window"])
        if self._run is not None:
            self._run.log({"window": record["window"], **numbers})

    def sync(self) -> None:
        """Wait until every line is on disk; called before a checkpoint counts them."""
        with _told(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close all outputs; errors in writing were already reported."""
        with suppress(OSError):
            self._file.close()
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
        if self._run is not None:
            self._run.finish()


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by the names under which they are plotted."""
    values = {name: value for name, value in record.items() if name not in ("window", "time")}
    for name, value in values.pop("terms", {}).items():
        values[f"terms/{name}"] = value
    if isinstance(values["lr"], list):
        values |= {f"lr/{group}": rate for group, rate in enumerate(values.pop("lr"))}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _wandb_run(project: str, folder: Path, settings: Mapping[str, Any]) -> Any:
    """Begin a run of Weights & Biases; a resumed one continues under the id of its folder."""
    try:
        import wandb
    except ImportError:
        raise MissingExtraError("wandb", "wandb", f"--wandb {project}") from None
    known = folder / "wandb-id.txt"
    if not known.exists():
        known.write_text(uuid4().hex[:12], encoding="utf-8")
    try:
        run = wandb.init(
            project=project, id=known.read_text(encoding="utf-8"), resume="allow", name=folder.name,
            dir=str(folder), config=dict(settings), settings=wandb.Settings(silent=True),
        )  # fmt: skip
    except wandb.Error as error:
        raise OptionError(f"--wandb {project}: {error}") from error
    run.define_metric("*", step_metric="window")
    return run


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn an error of the disk into one that names the file."""
    try:
        yield
    except OSError as error:
        raise StateError(f"cannot write {path}: {reason(error)}") from error


@contextmanager
def _without_tensorflow() -> Iterator[None]:
    """Make TensorBoard use its own file system instead of TensorFlow's, if both are installed.

    TensorFlow takes seconds to import and draws from NumPy's generator on import, so a run would
    differ with and without it. TensorBoard skips TensorFlow if this module exists.
    """
    name = "tensorboard.compat.notf"
    if name in sys.modules or "tensorflow" in sys.modules:
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]
