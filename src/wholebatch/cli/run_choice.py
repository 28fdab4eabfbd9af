"""Which run a command means: a new one, one to resume, or after a restart the one it had begun."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wholebatch.cli.checkpoints import Checkpoints, Found
from wholebatch.cli.from_file import Source
from wholebatch.cli.parallel_ranks import Crew
from wholebatch.cli.recipes import EMBEDDED, Recipe, load_recipe
from wholebatch.cli.run_folder import RunFolder, find_run, launched_folder, new_folder
from wholebatch.cli.run_settings import Config, Given, read_config, refuse_idle, resolve
from wholebatch.errors import OptionError, StateError

__all__ = ["Asked", "Start", "checkpoint_of", "find"]

_WAIT_AFTER_RESTART = 60.0  # for a first rank on another machine that is still being ended


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    recipe: str | None
    given: Given
    out: Path | None
    resume: bool
    auto_resume: bool
    source: Source = field(default_factory=Source)
    typed: frozenset[str] = frozenset()
    """Of `given`, what the command line has, not a file."""


@dataclass(frozen=True)
class Start:
    """What is trained, how, and where; `is_resumed` when the folder has a checkpoint of it."""

    recipe: Recipe
    config: Config
    folder: RunFolder
    is_resumed: bool
    has_changed: bool
    wait: float


def find(asked: Asked, crew: Crew) -> Start:
    """The same on every rank: the first one looks at the folders."""
    # Not the same on all machines: one that failed has counted, another may not have.
    restarted = crew.any(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0)
    path, stored = crew.first(lambda: _begun(asked, restarted))
    recipe = crew.together(
        lambda: load_recipe(asked.recipe or (stored["recipe"] if stored else next(iter(EMBEDDED))))
    )
    config = crew.together(
        lambda: resolve(asked.given, recipe.defaults, stored=stored["settings"] if stored else None)
    )
    crew.together(
        lambda: refuse_idle(
            asked.typed, config, parallel=crew.parallel, schedule_ends=recipe.schedule_ends
        )
    )
    if path is None:
        path = crew.first(lambda: _new(asked, recipe))
    return Start(
        recipe,
        config,
        RunFolder(path),
        is_resumed=stored is not None,
        has_changed=stored is not None and stored["recipe_sha256"] != recipe.digest,
        wait=_WAIT_AFTER_RESTART if restarted else 0.0,
    )


def checkpoint_of(start: Start, crew: Crew) -> Found | None:
    """The newest good checkpoint: the first rank finds it, all read the same."""
    if not start.is_resumed:
        return None
    checkpoints = Checkpoints(start.folder.checkpoints)
    if crew.ranks == 1:
        return checkpoints.load()
    found: list[Found] = []

    def newest() -> Path:
        found.append(checkpoints.load())
        return found[0].path

    path = crew.first(newest)

    def read() -> Found:
        if not path.exists():
            raise StateError(
                f"{path} is not there on this machine: --out must be on storage that all share"
            )
        return checkpoints.read(path)

    return crew.together(lambda: found[0] if found else read())


def _begun(asked: Asked, restarted: bool) -> tuple[Path | None, dict[str, Any] | None]:
    """The folder to go on in and its settings; nothing where a new run begins."""
    if asked.resume:
        folder = find_run(asked.recipe, asked.out)
        return folder.path, read_config(folder.config)
    if not asked.auto_resume and not restarted:
        return None, None
    path = asked.out or launched_folder(asked.recipe or next(iter(EMBEDDED)))
    if path is None:
        what = "--auto-resume" if asked.auto_resume else "restarted by torchrun"
        raise OptionError(f"{what}: which run to continue is not known; say where with --out")
    folder = RunFolder(path)
    if folder.config.is_file() and Checkpoints(folder.checkpoints).paths():
        return path, read_config(folder.config)
    return None, None


def _new(asked: Asked, recipe: Recipe) -> Path:
    out = asked.out or launched_folder(asked.recipe or recipe.name)
    if out is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise OptionError(
            "torchrun --max-restarts: a restart must find its run; give --out (or torchrun "
            "--standalone, or --rdzv-id)"
        )
    return new_folder(recipe.name, out).path
