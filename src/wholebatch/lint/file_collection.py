"""Collecting the files to check, and checking them in parallel."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from .check_file import UNREAD, check_file
from .findings import Finding
from .lint_settings import Settings

__all__ = ["collect", "lint_files"]

_SUFFIXES = (".py", ".ipynb")
_SKIPPED = {
    ".git", ".hg", ".svn", ".venv", "venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".tox",
    ".pytest_cache", "node_modules", ".ipynb_checkpoints", "site-packages", ".eggs", "build",
    "dist",
}  # fmt: skip
# Starting workers takes about as long as checking this many files.
_ALONE = 64
_CHUNK = 32


def collect(paths: Iterable[str], settings: Settings) -> list[str]:
    """Return every script and notebook under the paths, sorted; named files are always read."""
    found: dict[str, None] = {}
    for given in paths:
        path = Path(given)
        if path.is_file():
            found[str(path)] = None
            continue
        if not path.exists():
            raise FileNotFoundError(given)
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(f for f in folders if f not in _SKIPPED)
            for name in sorted(names):
                if name.endswith(_SUFFIXES):
                    file = os.path.join(folder, name)
                    if not settings.excludes(file):
                        found[file] = None
    return list(found)


def lint_files(
    files: Sequence[str], settings: Settings, *, jobs: int | None = None
) -> list[Finding]:
    """Return the findings of all files, in the order of the files."""
    workers = min(jobs or _cores(), max(1, len(files) // _CHUNK))
    if workers <= 1 or (jobs is None and len(files) < _ALONE):
        return [f for file in files for f in _guarded(file, settings)]
    context = multiprocessing.get_context(_start_method())
    chunks = [files[i : i + _CHUNK] for i in range(0, len(files), _CHUNK)]
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        results = pool.map(_chunk, chunks, [settings] * len(chunks))
        return [finding for chunk in results for finding in chunk]


def _start_method() -> str:
    """Return the start method of workers: fork is fastest, but unsafe with threads or torch."""
    if sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules:
        return "fork"
    return "spawn" if os.name == "nt" else "forkserver"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def _chunk(files: Sequence[str], settings: Settings) -> list[Finding]:
    return [f for file in files for f in _guarded(file, settings)]


def _guarded(file: str, settings: Settings) -> list[Finding]:
    """Check a file; report an internal error as a finding and go on."""
    try:
        return check_file(file, settings)
    except Exception as error:
        words = f"could not be checked ({type(error).__name__}: {error}); please report this file"
        return [Finding(file, 1, 1, UNREAD, words, "error")]
