"""The numbers of every window for Weights & Biases, with or without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholebatch.cli.report.metrics_file import scalars_of
from wholebatch.core.json_files import read_json
from wholebatch.errors import MissingExtraError, OptionError

__all__ = ["WandbRun"]


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
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise OptionError(
                f"--wandb {project}: Weights & Biases does not begin a run ({reason}); "
                "WANDB_MODE=offline needs neither network nor account, --wandb off leaves it out"
            ) from error
        self.id: str = self._run.id
        known.write_text(json.dumps({"project": project, "id": self.id}) + "\n", encoding="utf-8")
        self._run.define_metric("window")
        self._run.define_metric("*", step_metric="window")

    def write(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record, over its window."""
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
