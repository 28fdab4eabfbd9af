"""`manifest.json`: everything that a run was made from, enough to repeat it."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from wholebatch import __version__
from wholebatch.tune.batch_scaling import Arithmetic, BatchSchedule

__all__ = ["arithmetic_of", "commit_of", "device_here", "manifest_text", "versions_here"]

_FORMAT = 1


def manifest_text(
    *,
    recipe: str,
    digest: str,
    unit: str,
    settings: Mapping[str, Any],
    arithmetic: Any,
    device: torch.device,
    ranks: int,
    commit: Mapping[str, Any] | None,
) -> str:
    """Return the manifest of a run that begins now; `settings` are options of `train --from`."""
    content = {
        "kind": "wholebatch manifest",
        "format": _FORMAT,
        "again": "wholebatch train --from manifest.json",
        "recipe": recipe,
        "recipe_sha256": digest,
        "unit": unit,
        "settings": dict(settings),
        "arithmetic": arithmetic,
        "seeds": {"seed": settings["seed"], "of_rank": "seed + rank, after the model was made"},
        "versions": versions_here(),
        "device": {**device_here(device), "ranks": ranks},
        "commit": commit,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return json.dumps(content, indent=2) + "\n"


def versions_here() -> dict[str, str]:
    """Return the versions of the software: another version may round differently."""
    return {
        "wholebatch": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def device_here(device: torch.device) -> dict[str, Any]:
    """Describe the device; on a CPU, `threads` decide the order of sums."""
    about: dict[str, Any] = {
        "type": device.type,
        "name": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about.update(
            name=properties.name,
            memory=properties.total_memory,
            cuda=torch.version.cuda,
            tf32=torch.backends.cuda.matmul.allow_tf32,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    return about


def arithmetic_of(
    batch_size: int, schedule: str | None, *, micro_batch: int | None, ranks: int
) -> Any:
    """Return the arithmetic of a full batch: one entry, or one for each size of a schedule."""
    if micro_batch is None:  # A token budget: every batch splits differently.
        return {"global_batch": batch_size, "ranks": ranks}
    if schedule is None:
        return Arithmetic(batch_size, micro_batch, ranks).as_dict()
    changes = BatchSchedule.parse(schedule)
    return [
        {"from": place, "by": changes.by, **Arithmetic(size, micro_batch, ranks).as_dict()}
        for place, size in changes.changes
    ]


def commit_of(file: Path) -> dict[str, Any] | None:
    """Return the git commit of a tracked file, and whether tracked files differ from it."""
    if _git(file, "ls-files", "--error-unmatch", file.name) is None:
        return None  # Not in git, or ignored there.
    commit = _git(file, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(file, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "changed": bool(changed)}


def _git(file: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(file.parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
