"""Run a training script for real under a watch, in a copy of its folder.

The script may overwrite its checkpoints and logs: it does so in the copy, which is thrown away.
What it writes elsewhere (an absolute path, a server) is real.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from wholebatch.cli.report.terminal_output import say
from wholebatch.errors import OptionError
from wholebatch.readable_sizes import bytes_said

if TYPE_CHECKING:
    from wholebatch.verification import LoopVerdict

_MOST_BYTES = 2 << 30
_MOST_FILES = 20_000
_PATIENCE = 120.0
"""Seconds that a rank waits for the copy that the first rank of its machine makes."""


@dataclass(frozen=True)
class ScriptRun:
    """What a script has shown: the verdict, and how it ended."""

    verdict: LoopVerdict
    failed: bool
    interrupted: bool = False


def run_script(script: Path, arguments: Sequence[str], *, windows: int | None) -> ScriptRun:
    """Run a script as `python script arguments` does, to the end of its first epoch."""
    from wholebatch.verification.watch_loop import Watch, WatchIsOver

    watched = Watch(name=script.name, windows=windows, logs=False)
    failed = False
    with _folder_of(script) as copied:
        if os.environ.get("RANK", "0") == "0":
            say(Console(stderr=True), _announcement(script, windows))
        before = sys.argv, sys.path[:]
        name = str(copied if script.is_absolute() else script)
        sys.argv, sys.path[0] = [name, *arguments], str(copied.parent)
        try:
            with watched:
                runpy.run_path(str(copied), run_name="__main__")
        except WatchIsOver:
            pass
        except KeyboardInterrupt:
            return ScriptRun(watched.verdict, failed=True, interrupted=True)
        except SystemExit as ended:
            failed = bool(ended.code)
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
        except Exception as error:
            failed = True
            _show_traceback(error, copied)
        finally:
            sys.argv, sys.path[:] = before
    return ScriptRun(watched.verdict, failed)


def _announcement(script: Path, windows: int | None) -> str:
    where = "in a copy of its folder, which is thrown away"
    ends = {None: "after its first pass over the training data", 0: "where it ends itself"}
    end = ends.get(windows, f"after {windows} window{'s' if windows != 1 else ''}")
    return f"Running {script} for real, {where}. It stops {end}."


def _show_traceback(error: Exception, script: Path) -> None:
    """Print the traceback of a script as Python does, without the frames that ran it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != str(script):
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame)


@contextmanager
def output_to_stderr() -> Iterator[None]:
    """Send what a script prints to stderr: also what its libraries and processes print."""
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
        kept = os.dup(number)
        os.dup2(sys.stderr.fileno(), number)
    except (OSError, ValueError):  # a stream of Python alone
        with redirect_stdout(sys.stderr):
            yield
        return
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, number)
        os.close(kept)


# ------------------------------------------------------------------------- the copy of the folder


@contextmanager
def _folder_of(script: Path) -> Iterator[Path]:
    """Make a copy of the working folder, and of the script's where that is outside; go there."""
    script, home = script.resolve(), Path.cwd()
    roots = [home, script.parent]
    roots = [
        folder for folder in roots if not any(r != folder and r in folder.parents for r in roots)
    ]
    roots = list(dict.fromkeys(roots))
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if is_first:
        _refuse_large(roots)
    scratch = Path(tempfile.gettempdir()) / f"wholebatch-verify-{_job()}"
    places = {root: scratch / str(number) / root.name for number, root in enumerate(roots)}
    done = scratch / "copied"
    try:
        if is_first:
            for root, place in places.items():
                _copy(root, place)
            done.touch()
        _wait_for(done)
        os.chdir(_moved(home, places))
        yield _moved(script, places)
    finally:
        os.chdir(home)
        if is_first:
            shutil.rmtree(scratch, ignore_errors=True)


def _job() -> int:
    """Return a number that the ranks of one job on one machine have in common."""
    return os.getppid() if "LOCAL_RANK" in os.environ else os.getpid()


def _moved(path: Path, places: dict[Path, Path]) -> Path:
    root = next(place for place in places if place == path or place in path.parents)
    return places[root] / path.relative_to(root)


def _wait_for(done: Path) -> None:
    limit = time.monotonic() + _PATIENCE
    while not done.exists():
        if time.monotonic() > limit:
            raise OptionError(f"no copy of the script's folder was made within {_PATIENCE:g} s")
        time.sleep(0.05)


def _is_linked(path: Path) -> bool:
    """True for what is linked and not copied: links, repositories, virtual environments."""
    return path.is_symlink() or path.name == ".git" or (path / "pyvenv.cfg").is_file()


def _refuse_large(roots: Sequence[Path]) -> None:
    size = count = 0
    for root in roots:
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if not _is_linked(Path(folder, name))]
            count += len(folders) + len(files)
            size += sum(os.lstat(os.path.join(folder, name)).st_size for name in files)
            if size > _MOST_BYTES or count > _MOST_FILES:
                raise OptionError(
                    f"{root}: the script runs in a copy of it, and it has more than "
                    f"{bytes_said(_MOST_BYTES)} or {_MOST_FILES:,} files: go to a smaller folder, "
                    "or replace its data by a link (ln -s)"
                )


def _copy(root: Path, place: Path) -> None:
    """Copy a folder; links stay links to where they led."""
    linked: list[Path] = []

    def left_out(folder: str, names: list[str]) -> list[str]:
        paths = [Path(folder, name) for name in names]
        linked.extend(path for path in paths if _is_linked(path))
        return [
            path.name for path in paths if _is_linked(path) or not (path.is_file() or path.is_dir())
        ]

    shutil.copytree(root, place, ignore=left_out)
    for path in linked:
        (place / path.relative_to(root)).symlink_to(os.path.realpath(path))
