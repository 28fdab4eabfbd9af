"""The folders in which Inductor and Triton keep what they have compiled, for the next process.

They belong to torch and Triton, which make their keys: the graph, options, versions, device.
Every entry can be removed at any time; it is compiled again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path

LIMIT = 20 << 30
"""The size of all folders together above which a compile worker removes the oldest files."""


@dataclass(frozen=True)
class CacheFolder:
    """A folder of compiled code."""

    name: str
    path: Path
    variable: str
    """The environment variable that moves it."""

    def files(self) -> Iterator[os.DirEntry[str]]:
        """Yield all files in it; what vanishes meanwhile is left out."""
        open_ = [str(self.path)]
        while open_:
            try:
                with os.scandir(open_.pop()) as found:
                    for entry in found:
                        if entry.is_dir(follow_symlinks=False):
                            open_.append(entry.path)
                        else:
                            yield entry
            except OSError:
                continue

    def measured(self) -> tuple[int, int]:
        """Return the number of its files, and their size in bytes."""
        sizes = [found.st_size for found in map(_stat, self.files()) if found is not None]
        return len(sizes), sum(sizes)


def cache_folders() -> list[CacheFolder]:
    """Return the folders of this user; none of them need exist."""
    # As in torch._inductor.runtime.cache_dir_utils, without importing torch.
    by_default = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    inductor = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or by_default)
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    return [
        CacheFolder("Inductor", inductor, "TORCHINDUCTOR_CACHE_DIR"),
        CacheFolder("Triton", triton, "TRITON_CACHE_DIR"),
    ]


def marks() -> Path:
    """Return the folder of this package's own marks. Whoever clears Inductor's cache clears it."""
    return cache_folders()[0].path / "wholebatch"


def leave_mark(mark: Path) -> None:
    """Leave a mark for the next process, if the cache can be written."""
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


@contextmanager
def claimed(mark: Path, *, patience: float = 300.0) -> Iterator[bool]:
    """Claim the work that leaves this mark among all processes that share the cache.

    Wait while another process has it, for `patience` seconds at most; False if that one has done
    it. A claim ends with its process.
    """
    with ExitStack() as stack:
        with suppress(OSError, ImportError):  # The cache cannot be written, or has no locks.
            from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock

            mark.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(mark.with_name(f"{mark.name}.busy").open("w"))
            stack.callback(flock, file, LOCK_UN)  # Forked children hold the file open.
            until = time.monotonic() + patience
            while time.monotonic() < until and not mark.exists():
                with suppress(BlockingIOError):
                    flock(file, LOCK_EX | LOCK_NB)
                    break
                time.sleep(0.05)
        yield not mark.exists()


def _user() -> str:
    """Return the user's name as torch writes it into the folder's name."""
    try:
        name = getuser()
    except (KeyError, OSError):  # A container without a name for this user.
        name = str(os.getuid())
    return "".join("_" if one in r'\/:*?"<>|' else one for one in name)


def clear() -> int:
    """Empty the folders; return the bytes that are free now."""
    before = sum(folder.measured()[1] for folder in cache_folders())
    for folder in cache_folders():
        for child in folder.path.iterdir() if folder.path.is_dir() else ():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=True)
            else:
                child.unlink(missing_ok=True)
    return before - sum(folder.measured()[1] for folder in cache_folders())


def trim(most: int = LIMIT) -> int:
    """Remove the files that were not used for longest until `most` bytes are left.

    Return the bytes that are free now.
    """
    found = [
        (max(stat.st_mtime, stat.st_atime), stat.st_size, entry.path)
        for folder in cache_folders()
        for entry in folder.files()
        if (stat := _stat(entry)) is not None
    ]
    size = total = sum(one[1] for one in found)
    for _, bytes_, path in sorted(found):
        if size <= most:
            break
        try:
            os.unlink(path)
            size -= bytes_
        except OSError:
            continue
    return total - size


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None
