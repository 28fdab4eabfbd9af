"""The numbers of every window for TensorBoard."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from wholebatch.errors import MissingExtraError
from wholebatch.report.metrics import scalars_of

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
            self._writer: Any = SummaryWriter(
                str(folder), purge_step=windows + 1 if windows else None, flush_secs=10
            )

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a record, by its window."""
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, record["window"])

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
