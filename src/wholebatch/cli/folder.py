"""The folder of a run: found, made, checked and held by one process."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wholebatch.errors import OptionError, StateError

__all__ = ["RunFolder", "find_run", "new_folder", "resume_command", "shown"]

_RUNS = Path("runs")


class RunFolder:
    """Where everything of a run is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.events = path / "tensorboard"
        self._lock = path / ".lock"

    def has_run(self) -> bool:
        """Whether something would be lost by beginning anew: an update, or part of a window."""
        started = self.metrics.exists() and self.metrics.stat().st_size > 0
        saved = self.checkpoints.is_dir() and any(
            path.name != "window-00000000.pt" for path in self.checkpoints.glob("window-*.pt")
        )
        return started or saved

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make it, see that it can be written, and hold it: one process writes to a run.

        A folder that was made here and is left by an error before anything was written goes again.
        """
        is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            lock = self._lock.open("a+")
        except OSError as error:
            raise OptionError(
                f"--out {self.path}: cannot be written: {error.strerror or error}"
            ) from error
        with lock:
            if not _lock(lock):
                raise StateError(
                    f"{self.path} is being written by another process; wait, or stop it"
                )
            try:
                yield
            except BaseException:
                if is_new:
                    self._remove_if_empty()
                raise

    def _remove_if_empty(self) -> None:
        with suppress(OSError):
            self.checkpoints.rmdir()
            self._lock.unlink()
            self.path.rmdir()

    def clear_beginning(self) -> None:
        """Remove what a run left that ended before its first update."""
        for path in self.checkpoints.glob("window-*"):
            path.unlink(missing_ok=True)
        self.metrics.unlink(missing_ok=True)
        shutil.rmtree(self.events, ignore_errors=True)


def new_folder(recipe: str, out: Path | None) -> RunFolder:
    """The folder of a new run; one that has a run already is refused, so nothing is lost."""
    if out is None:
        name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        path, number = _RUNS / name, 2
        while path.exists():
            path, number = _RUNS / f"{name}-{number}", number + 1
        return RunFolder(path)
    folder = RunFolder(out)
    try:
        if out.exists() and not out.is_dir():
            raise OptionError(f"--out {out}: is a file; give a folder")
        if folder.has_run():
            raise OptionError(
                f"--out {out}: has a run already; continue it with --resume, or give another --out"
            )
    except OSError as error:
        raise OptionError(f"--out {out}: cannot be read: {error.strerror or error}") from error
    return folder


def find_run(recipe: str | None, out: Path | None) -> RunFolder:
    """The run to resume: in `out`, else the newest of runs/ (of this recipe, if one is named)."""
    if out is not None:
        if not (out / "config.json").is_file():
            raise StateError(f"--resume: there is no run in {out}")
        return RunFolder(out)
    stem = None if recipe is None else Path(recipe).stem
    pattern = "*" if stem is None else f"{stem}-*"
    runs = [path.parent for path in _RUNS.glob(f"{pattern}/config.json")]
    if not runs:
        which = "" if stem is None else f" of {stem}"
        raise StateError(f"--resume: there is no run{which} in {_RUNS}/; say where with --out")
    return RunFolder(max(runs, key=_last_written))


def _last_written(run: Path) -> float:
    written = (run / "config.json", *run.glob("checkpoints/window-*.pt"))
    return max(path.stat().st_mtime for path in written)


def resume_command(path: Path, *, steps: int | None = None) -> str:
    """What to type to go on, as this process was called."""
    called = Path(sys.argv[0])
    installed = shutil.which("wholebatch")
    if called.name == "__main__.py":
        program = f"{shlex.quote(shown(Path(sys.executable)))} -m wholebatch.cli"
    elif installed is not None and Path(installed).resolve() == called.resolve():
        program = "wholebatch"
    else:
        program = shlex.quote(shown(called))
    more = f" --steps {steps}" if steps is not None else ""
    return f"{program} train --resume --out {shlex.quote(shown(path))}{more}"


def shown(path: Path) -> str:
    """A path as a person would type it from here."""
    absolute = Path(os.path.abspath(path))
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


def _lock(file: Any) -> bool:
    """Hold the file until the process ends, however it ends. True where no lock can be had."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
