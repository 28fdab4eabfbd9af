"""Where a run comes from, for `config.json`: code, versions, machine."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from wholebatch import __version__


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package, and of the packages that are imported."""
    imported = {
        name: found.version
        for found in distributions()
        if (name := (found.metadata["Name"] or "").lower().replace("-", "_")) in sys.modules
    }
    return {**imported, "wholebatch": __version__, "python": platform.python_version()}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the repository that holds this folder, and True if it has changes."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):  # no git, or no repository
        return None
