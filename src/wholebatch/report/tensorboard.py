"""The numbers of every window for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholebatch.errors import MissingExtraError
from wholebatch.report.metrics import scalars_of

__all__ = ["Events"]


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
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, record["window"])

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
