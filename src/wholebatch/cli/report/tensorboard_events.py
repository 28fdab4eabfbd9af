"""The numbers of every window for TensorBoard."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from wholebatch.cli.report.metrics_file import scalars_of, writing
from wholebatch.core.plain_files import reason
from wholebatch.errors import MissingExtraError, StateError

__all__ = ["Events"]


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
                raise MissingExtraError("tensorboard", "cli", "wholebatch train") from None
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
