"""Settings of the linter: the command line over `[tool.wholebatch.lint]` of pyproject.toml."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .rules import RULES

# Codes of findings that no rule makes: a syntax error, an unreadable file, the note.
OTHER_CODES = {
    "WB001": "a syntax error: the file, or this cell of a notebook, was not checked.",
    "WB002": "a file that could not be read: it is over 2 MB, or no regular file.",
    "WB003": "a loop that accumulates in a way that the rules do not understand. It may be right "
    "or wrong: `wholebatch verify SCRIPT.py` runs it and compares its update.",
}
"""Codes that are not rules, and what they mean."""


class SettingsError(ValueError):
    """An invalid setting. The message says what is allowed."""


@dataclass(frozen=True)
class Settings:
    """Everything that changes which findings are reported."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def wants(self, code: str) -> bool:
        """True if a code is to be reported; a prefix such as `WB1` selects many."""
        if code.startswith(self.ignore):
            return False
        return not self.select or code.startswith(self.select)

    def excludes(self, path: str) -> bool:
        """True if a path is excluded: it matches a pattern, or a part of it has the name."""
        here = Path(path)
        return any(here.match(pattern) or pattern in here.parts for pattern in self.exclude)


def load_settings(
    start: Path,
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> Settings:
    """Return the settings of the nearest pyproject.toml above `start`, plus the command line."""
    folder = start.resolve()
    files = [parent / "pyproject.toml" for parent in (folder, *folder.parents)]
    nearest = next((file for file in files if file.is_file()), None)
    settings = Settings() if nearest is None else _settings_of(nearest)
    chosen = _codes(select, "--select ")
    return replace(
        settings,
        select=chosen or settings.select,
        ignore=(*settings.ignore, *_codes(ignore, "--ignore ")),
        exclude=(*settings.exclude, *exclude),
    )


def _settings_of(file: Path) -> Settings:
    table = _table(file)
    known = [f.name for f in fields(Settings)]
    for name, value in table.items():
        if name not in known:
            raise SettingsError(
                f"{file}: [tool.wholebatch.lint] has no setting {name!r}; it has {', '.join(known)}"
            )
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise SettingsError(f"{file}: {name}={value!r}: must be a list of strings")
    return Settings(
        select=_codes(table.get("select", ()), f"{file}: select = "),
        ignore=_codes(table.get("ignore", ()), f"{file}: ignore = "),
        exclude=tuple(table.get("exclude", ())),
    )


def _table(file: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            return {}
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file}: is not TOML: {error}") from error
    table = data.get("tool", {}).get("wholebatch", {}).get("lint", {})
    if not isinstance(table, dict):
        raise SettingsError(f"{file}: [tool.wholebatch.lint] must be a table")
    return table


def _codes(given: Iterable[str], place: str) -> tuple[str, ...]:
    """Split codes and prefixes at commas; refuse a code that matches no rule."""
    known: Sequence[str] = [*OTHER_CODES, *(rule.code for rule in RULES)]
    codes = tuple(code.upper() for item in given for code in item.replace(",", " ").split())
    for code in codes:
        if not any(k.startswith(code) for k in known):
            raise SettingsError(
                f"{place}{code}: names no rule; codes are {RULES[0].code} to {RULES[-1].code}, "
                "or a prefix such as WB1"
            )
    return codes
