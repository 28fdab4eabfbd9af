"""The folder of a run: which one is meant, its lock, its config.json and manifest.json."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wholebatch import __version__
from wholebatch.cli.checkpoints import Checkpoints, Found
from wholebatch.cli.parallel_ranks import World
from wholebatch.cli.recipes.recipe import Recipe, load_recipe
from wholebatch.cli.recipes.recipe_files import EMBEDDED
from wholebatch.cli.report.terminal_output import path_from_here
from wholebatch.cli.run_settings import (
    Config,
    Given,
    config_text,
    read_config,
    refuse_idle,
    resolve,
)
from wholebatch.errors import OptionError, StateError
from wholebatch.plain_files import reason, write_atomically
from wholebatch.tune.batch_scaling import Arithmetic, BatchSchedule

if TYPE_CHECKING:
    from wholebatch.cli.training_run import Session

_RUNS = Path("runs")
_FORMAT = 1  # of the manifest


class RunFolder:
    """The folder with everything of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.events = path / "tensorboard"
        self._lock = path / ".lock"

    def has_run(self) -> bool:
        """Return True if beginning anew would lose something: an update, or part of a window."""
        started = self.metrics.exists() and self.metrics.stat().st_size > 0
        saved = self.checkpoints.is_dir() and any(
            path.stem != "window-00000000"
            for kind in ("pt", "sharded")
            for path in self.checkpoints.glob(f"window-*.{kind}")
        )
        return started or saved

    @contextmanager
    def held(self, wait: float = 0.0) -> Iterator[None]:
        """Make it, see that it can be written, and hold it: one process writes to a run.

        A folder that was made here and is left by an error before anything was written goes again.
        """
        is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            lock = self._lock.open("a+")
        except OSError as error:
            where = f" ({error.filename})" if error.filename not in (None, str(self.path)) else ""
            raise OptionError(
                f"--out {self.path}: cannot be written: {reason(error)}{where}"
            ) from error
        with lock:
            until = time.monotonic() + wait
            while not _lock(lock):
                if time.monotonic() < until:
                    time.sleep(0.1)
                    continue
                raise StateError(
                    f"{self.path} is being written by another process; wait, or stop it"
                )
            try:
                yield
            except BaseException:
                with suppress(OSError):  # of a folder that is not empty
                    if is_new:
                        self.checkpoints.rmdir()
                        self._lock.unlink()
                        self.path.rmdir()
                raise

    def check_there(self) -> None:
        """Refuse to go on if somebody has removed or moved the folder since the run began."""
        if not (self.checkpoints.is_dir() and self.config.exists()):
            raise StateError(
                f"{self.path} was removed or moved while the run was writing to it: nothing more "
                "can be saved there"
            ) from FileNotFoundError(str(self.path))

    def clear_beginning(self) -> None:
        """Remove what a run left that ended before its first update."""
        Checkpoints(self.checkpoints).clean("window-*")
        self.metrics.unlink(missing_ok=True)
        shutil.rmtree(self.events, ignore_errors=True)


def new_folder(recipe: str, out: Path | None) -> RunFolder:
    """Return the folder of a new run; refuse one that has a run already, so nothing is lost."""
    if out is None:
        name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        path, number = _RUNS / name, 2
        while path.exists():
            path, number = _RUNS / f"{name}-{number}", number + 1
        return RunFolder(path)
    folder = RunFolder(out)
    try:
        if out.is_symlink() and not out.exists():
            raise OptionError(f"--out {out}: is a link that leads nowhere; give a folder")
        if out.exists() and not out.is_dir():
            raise OptionError(f"--out {out}: is a file; give a folder")
        if folder.has_run():
            raise OptionError(
                f"--out {out}: has a run already; continue it with --resume, or give another --out"
            )
    except OSError as error:
        raise OptionError(f"--out {out}: cannot be read: {reason(error)}") from error
    return folder


def launched_folder(recipe: str) -> Path | None:
    """Return the folder of a run without --out, named by torchrun's job id: restarts find it."""
    number = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if number == "none":  # torchrun's own word for: nobody gave one
        return None
    stem = Path(recipe).stem
    return _RUNS / f"{stem}-{re.sub(r'[^A-Za-z0-9_.-]', '_', number)}"


def find_run(recipe: str | None, out: Path | None) -> RunFolder:
    """Return the run to resume: in `out`, else the newest of runs/ (of this recipe, if named)."""
    if out is not None:
        if not os.path.lexists(out / "config.json"):  # what else it may be, is told when it is read
            raise StateError(f"--resume: there is no run in {out}")
        return RunFolder(out)
    stem = None if recipe is None else Path(recipe).stem
    pattern = "*" if stem is None else f"{stem}-*"
    runs = [path.parent for path in _RUNS.glob(f"{pattern}/config.json")]
    if not runs:
        which = "" if stem is None else f" of {stem}"
        raise StateError(f"--resume: there is no run{which} in {_RUNS}/; say where with --out")

    def last_written(run: Path) -> float:
        written = (run / "config.json", *Checkpoints(run / "checkpoints").paths())
        return max(path.stat().st_mtime for path in written)

    return RunFolder(max(runs, key=last_written))


def resume_command(path: Path, *, steps: int | None = None, parallel: str = "ddp") -> str:
    """Return the command that goes on with a run, in the way this process was called."""
    called = Path(sys.argv[0])
    installed = shutil.which("wholebatch")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        program = _launcher()
    elif called.name == "__main__.py":
        program = f"{shlex.quote(path_from_here(Path(sys.executable)))} -m wholebatch.cli"
    elif installed is not None and Path(installed).resolve() == called.resolve():
        program = "wholebatch"
    else:
        program = shlex.quote(path_from_here(called))
    more = f" --steps {steps}" if steps is not None else ""
    more += f" --parallel {parallel}" if parallel != "ddp" else ""
    return f"{program} train --resume --out {shlex.quote(path_from_here(path))}{more}"


def _launcher() -> str:
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    where = "--standalone" if machines == 1 else f"--nnodes {machines} --rdzv-endpoint HOST:PORT"
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return f"torchrun {where} --nproc-per-node {ranks} -m wholebatch.cli"


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


_WAIT_AFTER_RESTART = 60.0  # for a first rank on another machine that is still being ended


@dataclass(frozen=True)
class RunStart:
    """The recipe, settings and folder of a run that begins or, if `is_resumed`, goes on."""

    recipe: Recipe
    config: Config
    folder: RunFolder
    is_resumed: bool
    has_changed: bool
    wait: float


def find(given: Given, world: World, *, typed: Collection[str]) -> RunStart:
    """Return which run is meant, the same on every rank: the first one looks at the folders.

    `typed`: the options that the command line has, not a file.
    """
    # Not the same on all machines: one that failed has counted, another may not have.
    restarted = world.any(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0)
    path, stored = world.first(lambda: _begun(given, restarted))
    recipe = world.together(
        lambda: load_recipe(given.get("recipe") or (stored["recipe"] if stored else None))
    )
    config = world.together(
        lambda: resolve(given, recipe.defaults, stored=stored["settings"] if stored else None)
    )
    world.together(
        lambda: refuse_idle(
            typed, config, parallel=world.parallel, schedule_ends=recipe.schedule_ends
        )
    )
    if path is None:
        path = world.first(lambda: _new(given, recipe))
    return RunStart(
        recipe,
        config,
        RunFolder(path),
        is_resumed=stored is not None,
        has_changed=stored is not None and stored["recipe_sha256"] != recipe.digest,
        wait=_WAIT_AFTER_RESTART if restarted else 0.0,
    )


def checkpoint_of(start: RunStart, world: World) -> Found | None:
    """Return the newest good checkpoint: the first rank finds it, all read the same."""
    if not start.is_resumed:
        return None
    checkpoints = Checkpoints(start.folder.checkpoints)
    if world.ranks == 1:
        return checkpoints.load()
    found: list[Found] = []

    def newest() -> Path:
        found.append(checkpoints.load())
        return found[0].path

    path = world.first(newest)

    def read() -> Found:
        if not path.exists():
            raise StateError(
                f"{path} is not there on this machine: --out must be on storage that all share"
            )
        return checkpoints.read(path)

    return world.together(lambda: found[0] if found else read())


def _begun(given: Given, restarted: bool) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the folder to go on in and its settings; None for a new run."""
    if given.get("resume"):
        folder = find_run(given.get("recipe"), given.get("out"))
        return folder.path, read_config(folder.config)
    if not given.get("auto_resume") and not restarted:
        return None, None
    path = given.get("out") or launched_folder(given.get("recipe") or next(iter(EMBEDDED)))
    if path is None:
        what = "--auto-resume" if given.get("auto_resume") else "restarted by torchrun"
        raise OptionError(f"{what}: which run to continue is not known; say where with --out")
    folder = RunFolder(path)
    if folder.config.is_file() and Checkpoints(folder.checkpoints).paths():
        return path, read_config(folder.config)
    return None, None


def _new(given: Given, recipe: Recipe) -> Path:
    out = given.get("out") or launched_folder(given.get("recipe") or recipe.name)
    if out is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise OptionError(
            "torchrun --max-restarts: a restart must find its run; give --out (or torchrun "
            "--standalone, or --rdzv-id)"
        )
    return new_folder(recipe.name, out).path


# -------------------------------------------------------------------- config.json, manifest.json


def describe_run(folder: RunFolder, session: Session) -> None:
    """Write `config.json`, which a resume reads, and `manifest.json`, which repeats the run."""
    recipe, config, world = session.recipe, session.config, session.world
    parallel = {"ranks": world.ranks, "sharded": world.is_sharded, "parallel": world.parallel}
    about = {"device": str(session.world.device), **parallel, **about_here()}
    text = config_text(config, recipe=recipe.known_as, digest=recipe.digest, about=about)
    write_atomically(folder.config, text)
    size = session.train.micro_batch_size
    settings = {**config.stored, "device": session.world.device.type, "parallel": world.parallel}
    if config.micro_batch == "auto" and size is not None:
        settings["micro_batch"] = size  # what "auto" chose
    content = {
        "kind": "wholebatch manifest",
        "format": _FORMAT,
        "again": "wholebatch train --from manifest.json",
        "recipe": recipe.known_as,
        "recipe_sha256": recipe.digest,
        "unit": recipe.unit,
        "settings": settings,
        "arithmetic": arithmetic_of(
            config.batch_size, config.batch_schedule, micro_batch=size, ranks=world.ranks
        ),
        "seeds": {"seed": config.seed, "of_rank": "seed + rank, after the model was made"},
        "versions": versions_here(),
        "device": {**_device_here(session.world.device), "ranks": world.ranks},
        "commit": commit_of(recipe.path),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_atomically(folder.manifest, json.dumps(content, indent=2) + "\n")


def versions_here() -> dict[str, str]:
    """Return the versions of the software: another version may round differently."""
    return {
        "wholebatch": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def about_here() -> dict[str, Any]:
    """Return the versions of the software, and the number of threads."""
    return {**versions_here(), "threads": torch.get_num_threads()}


def _device_here(device: torch.device) -> dict[str, Any]:
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
    """Return the arithmetic of a full batch: one entry, or one for each size of a schedule.

    Of a batch that grows, the first.
    """
    if micro_batch is None:  # A token budget: every batch splits differently.
        return {"global_batch": batch_size, "ranks": ranks}
    if schedule is None or schedule.startswith("auto"):
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
