"""The record of every window, for `metrics.jsonl`, TensorBoard and Weights & Biases.

`metrics.jsonl` holds each window exactly once, also after a kill and a resume. Lines beyond the
checkpoint are cut off before the run goes on, and lines are on disk before the checkpoint that
counts them. `TIMING` lists the fields in which two identical runs differ.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from wholebatch.errors import MissingExtraError, OptionError, StateError
from wholebatch.plain_files import finite, read_json, reason
from wholebatch.window.window import Step

TIMING = frozenset({"seconds", "units_per_second", "time", "memory", "recoveries"})
"""The fields of a record about time and resources: two identical runs differ in them."""

_SCALARS = (
    "loss", "grad_norm", "clip", "loss_scale", "units", "units_per_second", "seconds", "batch_size",
    "micro_batches", "memory", "recoveries", "skipped_windows", "validation_loss",
    "noise_scale", "noise_low", "noise_high",
)  # fmt: skip


class Sink(Protocol):
    """Takes the record of every window: a file, or another service."""

    def write(self, record: Mapping[str, Any]) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


def record_of(
    step: Step,
    *,
    window: int,
    epoch: int,
    lr: list[float],
    now: float,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the record of one window. `update` counts updates, `window` also skipped ones.

    `more`: values that the step does not hold (memory, the noise scale and the like).
    """
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
    record.update(more or {})
    record["seconds"] = round(step.seconds, 6)
    record["units_per_second"] = round(step.units / step.seconds, 3) if step.seconds > 0 else None
    record["time"] = round(now, 3)
    return record


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by the names under which they are plotted."""
    found = {name: record.get(name) for name in _SCALARS}
    rates = record["lr"] if isinstance(record["lr"], list) else [record["lr"]]
    for group, rate in enumerate(rates):
        found["lr" if len(rates) == 1 else f"lr/{group}"] = rate
    for name, value in record.get("terms", {}).items():
        found[f"terms/{name}"] = value
    return {
        name: float(value)
        for name, value in found.items()
        if value is not None and math.isfinite(value)
    }


class MetricsFile:
    """`metrics.jsonl`, opened to continue after `windows` windows; later lines are cut off.

    A missing file is started again: `lost` is then the number of windows that are not in it.
    """

    def __init__(self, path: Path, *, windows: int) -> None:
        self.path = path
        self.first: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        self.lost = 0
        if path.exists() and not path.is_file():
            raise StateError(f"{path} is not a file: move it away, so that one can be written")
        try:
            kept, size = self._read(windows)
        except OSError as error:
            raise StateError(f"{path} cannot be read: {reason(error)}") from None
        if kept != windows:
            raise StateError(
                f"{path} holds {kept} of the {windows} windows before the checkpoint; it was "
                "changed by something else: move it away, or put it back as it was"
            )
        try:
            self._file = path.open("ab")
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise StateError(f"{path} cannot be written: {reason(error)}") from None

    def _read(self, windows: int) -> tuple[int, int]:
        """Return how many of the first windows the file holds, and the offset after them."""
        kept = size = 0
        if windows and not (self.path.exists() and self.path.stat().st_size):
            self.lost = kept = windows
        elif windows:
            with self.path.open("rb") as file:
                for line in file:
                    try:
                        record = json.loads(line)
                        if not size:  # The file may have been started again before.
                            self.lost = kept = min(max(0, record["window"] - 1), windows)
                        belongs = record["window"] == kept + 1 <= windows
                    except (ValueError, KeyError, TypeError, RecursionError):
                        belongs = False
                    if not belongs or not line.endswith(b"\n"):
                        break
                    kept += 1
                    size += len(line)
                    self.first = self.first or record
                    self.last = record
        return kept, size

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line; it has reached the operating system when this returns."""
        with writing(self.path):
            self._file.write(json.dumps(finite(record), allow_nan=False).encode() + b"\n")
            self._file.flush()
        self.first = self.first or dict(record)
        self.last = dict(record)

    def sync(self) -> None:
        """Wait until every line is on disk; called before a checkpoint counts them."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was told when it was
            self._file.close()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell a full disk, or a file that is gone, by its name."""
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


class Events:
    """TensorBoard's event files; after a resume, windows beyond the checkpoint are hidden."""

    def __init__(self, folder: Path, *, windows: int) -> None:
        with _without_tensorflow():
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise MissingExtraError(
                    "tensorboard", "tensorboard", "writing its events"
                ) from None
            self._folder = folder
            if folder.exists() and not folder.is_dir():  # TensorFlow has errors of its own for it
                raise StateError(f"{folder} cannot be written: File exists")
            try:
                self._writer: Any = SummaryWriter(
                    str(folder), purge_step=windows + 1 if windows else None, flush_secs=10
                )
            except OSError as error:
                raise StateError(f"{folder} cannot be written: {reason(error)}") from None
        self._hook_before = threading.excepthook
        threading.excepthook = self._thread_failed

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a record, by its window."""
        with writing(self._folder):
            for name, value in scalars_of(record).items():
                self._writer.add_scalar(name, value, record["window"])

    def sync(self) -> None:
        """Write what is held back; a failure of TensorBoard's own thread is told here too."""
        with writing(self._folder):
            self._writer.flush()

    def _thread_failed(self, args: threading.ExceptHookArgs) -> None:
        """Print nothing of TensorBoard's own thread: what it failed by is raised in `sync`."""
        if not (
            type(args.thread).__name__ == "_AsyncWriterThread"
            and issubclass(args.exc_type, OSError)
        ):
            self._hook_before(args)

    def close(self) -> None:
        threading.excepthook = self._hook_before
        with suppress(OSError):  # what could not be written was told when it was
            self._writer.close()


class WandbRun:
    """One run of a project; a resumed run continues under the same id.

    `WANDB_MODE=offline` writes everything to the run's folder, for `wandb sync` later. Curves are
    plotted over `window`, so windows repeated after a resume are drawn over, not twice.
    """

    def __init__(
        self, project: str, *, folder: Path, manifest: Mapping[str, Any], resumed: bool
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("wandb", "wandb", f"--wandb {project}") from None
        known = folder / "wandb.json"
        number = _id_in(known) if resumed else None
        try:
            self._run: Any = wandb.init(
                project=project,
                name=folder.name,
                id=number,
                resume="allow" if number else None,
                dir=str(folder),
                config=dict(manifest),
                settings=wandb.Settings(silent=True),
            )
        except Exception as error:  # Its own exception types: no key, no network, a wrong name.
            raise OptionError(
                f"--wandb {project}: Weights & Biases does not begin a run ({reason(error)}); "
                "WANDB_MODE=offline needs neither network nor account, --wandb off leaves it out"
            ) from error
        self.id: str = self._run.id
        known.write_text(json.dumps({"project": project, "id": self.id}) + "\n", encoding="utf-8")
        self._run.define_metric("window")
        self._run.define_metric("*", step_metric="window")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({"window": record["window"], **scalars_of(record)})

    def sync(self) -> None:
        """Do nothing: `metrics.jsonl` holds what a checkpoint counts."""

    def close(self) -> None:
        self._run.finish()


def _id_in(path: Path) -> str | None:
    try:
        found = read_json(path)["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
