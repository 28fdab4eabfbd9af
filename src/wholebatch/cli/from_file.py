"""What a command line says, completed from the file of `--from`.

Nothing here imports torch: a wrong option is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from wholebatch.cli.run_settings import Given, check
from wholebatch.core.json_files import read_json
from wholebatch.core.plain_files import reason
from wholebatch.errors import OptionError
from wholebatch.tune.batch_scaling import BatchSchedule

__all__ = ["Source", "given_of", "read_source"]

# Options of the command that are not settings of a run's configuration.
_PLACES = ("device", "parallel")
_NUMBERS: dict[str, Callable[[str], float]] = {
    **dict.fromkeys(("steps", "lr_steps", "seed", "checkpoint_every", "zero", "base_batch"), int),
    **dict.fromkeys(("clip_norm", "lr"), float),
}


@dataclass(frozen=True)
class Source:
    """What a file of `--from` says; nothing where there is none."""

    path: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    digest: str | None = None
    threads: int | None = None
    ranks: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def notes(self, *, digest: str, versions: Mapping[str, str], ranks: int) -> list[str]:
        """What is not here as it was there, so that the numbers may differ."""
        said = []
        if self.digest is not None and self.digest != digest:
            said.append(f"the recipe has changed since {self.path} was written")
        if self.ranks not in (None, ranks):
            said.append(f"{self.path} was written by {self.ranks} ranks, here there are {ranks}")
        for name, here in versions.items():
            then = self.versions.get(name, here)
            if here != then:
                said.append(f"{self.path} was written with {name} {then}, here it is {here}")
        return said


def read_source(path: Path | None) -> Source:
    """The file, checked: an OptionError says what is wrong with it."""
    if path is None:
        return Source()
    try:
        content = read_json(path)
    except OSError as error:
        raise OptionError(f"--from {path}: cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise OptionError(f"--from {path}: is not JSON: {error}") from None
    settings = content.get("settings") if isinstance(content, dict) else None
    if not isinstance(settings, dict):
        raise OptionError(
            f'--from {path}: has no object "settings"; give manifest.json of a run, or what '
            "wholebatch tune wrote"
        )
    known = [one.name for one in fields(Given)] + list(_PLACES)
    for name in settings:
        if name not in known:
            raise OptionError(
                f"--from {path}: the setting {name!r} is none of train's: {', '.join(known)}"
            )
    device, versions = content.get("device"), content.get("versions")
    here = device if isinstance(device, dict) else {}
    return Source(
        path,
        settings={name: value for name, value in settings.items() if value is not None},
        recipe=_recipe(content.get("recipe"), path),
        digest=content.get("recipe_sha256"),
        threads=_count(here.get("threads")),
        ranks=_count(here.get("ranks")),
        versions=versions if isinstance(versions, dict) else {},
    )


def given_of(options: Mapping[str, Any], source: Source) -> Given:
    """The settings that were given: on the command line, else in the file; all of them checked."""
    told = _with_schedule(
        {
            name: _as_typed(name, value)
            for name, value in source.settings.items()
            if name not in _PLACES
        },
        f"--from {source.path}: batch_size",
    )
    for name, value in told.items():
        check(name, value, f"--from {source.path}: {name}")
    typed = {name: value for name, value in options.items() if value is not None}
    typed = _with_schedule(typed, "--batch-size")
    for name, value in typed.items():
        check(name, value, "--" + name.replace("_", "-"))
    if "batch_size" in typed:  # the schedule of the file is not that of another size
        told.pop("batch_schedule", None)
    return Given(**{**told, **typed})


def _as_typed(name: str, value: Any) -> Any:
    """A number that is written as a string, which is what one types after an option."""
    if name in _NUMBERS and isinstance(value, str):
        with suppress(ValueError):
            return _NUMBERS[name](value)
    return value


def _with_schedule(settings: dict[str, Any], label: str) -> dict[str, Any]:
    """`batch_size` may be a schedule: then the batch size is its largest."""
    text = settings.get("batch_schedule", settings.get("batch_size"))
    if text is None or isinstance(text, int):
        return settings
    text = str(text).strip()
    if text.isascii() and text.isdigit():
        return {**settings, "batch_size": int(text)}
    if "@" not in text:
        raise OptionError(
            f"{label} {text}: must be a whole number of samples, or a schedule such as "
            "64@0,128@1000"
        )
    schedule = BatchSchedule.parse(text, label)
    if len(schedule.changes) == 1:
        return {**settings, "batch_size": schedule.first, "batch_schedule": None}
    return {**settings, "batch_size": schedule.largest, "batch_schedule": str(schedule)}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _recipe(name: Any, path: Path) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str):
        raise OptionError(f'--from {path}: "recipe" must be a name or a path')
    beside = path.parent / name
    return str(beside) if name.endswith(".py") and beside.is_file() else name
