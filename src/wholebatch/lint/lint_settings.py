"""Settings of the linter: the command line over `[tool.wholebatch.lint]` of pyproject.toml."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from wholebatch.errors import OptionError

from .rules import RULES

# Codes of findings that no rule makes: a syntax error, an unreadable file, the notes.
OTHER_CODES = {
    "WB001": "a syntax error: the file, or this cell of a notebook, was not checked.",
    "WB002": "a file that could not be read: it is over 2 MB, or no regular file.",
    "WB003": "a loop that accumulates in a way that the rules do not understand, or a loop of "
    "TensorFlow. It may be right or wrong: `wholebatch verify SCRIPT.py` runs it and compares its "
    "update.",
}
"""Codes that are not rules, and what they mean."""


@dataclass(frozen=True)
class Settings:
    """Everything that changes which findings are reported."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def wants(self, code: str) -> bool:
        """True if a code is to be reported; a prefix such as `WB1` selects many.

        As with ruff, the longer prefix wins: `select = ["WB101"]` over `ignore = ["WB1"]`.
        """
        selected = max((len(p) for p in self.select or ("",) if code.startswith(p)), default=-1)
        ignored = max((len(p) for p in self.ignore if code.startswith(p)), default=-1)
        return selected > ignored

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
    """Return the settings of the nearest pyproject.toml with a table for us, and the command line.

    As with ruff, `--select` replaces what the file selects and ignores.
    """
    folder = start.resolve()
    files = [parent / "pyproject.toml" for parent in (folder, *folder.parents)]
    tables = ((file, _table(file)) for file in files if file.is_file())
    nearest = next(((file, table) for file, table in tables if table is not None), None)
    settings = Settings() if nearest is None else _settings_of(*nearest)
    chosen = _codes(select, "--select ")
    return replace(
        settings,
        select=chosen or settings.select,
        ignore=(*(() if chosen else settings.ignore), *_codes(ignore, "--ignore ")),
        exclude=(*settings.exclude, *exclude),
    )


def _settings_of(file: Path, table: dict[str, Any]) -> Settings:
    known = [f.name for f in fields(Settings)]
    for name, value in table.items():
        if name not in known:
            raise OptionError(
                f"{file}: [tool.wholebatch.lint] has no setting {name!r}; it has {', '.join(known)}"
            )
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise OptionError(f"{file}: {name}={value!r}: must be a list of strings")
    return Settings(
        select=_codes(table.get("select", ()), f"{file}: select = "),
        ignore=_codes(table.get("ignore", ()), f"{file}: ignore = "),
        exclude=tuple(table.get("exclude", ())),
    )


def _table(file: Path) -> dict[str, Any] | None:
    """Return our table of a pyproject.toml, or None if it has none."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            return None
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{file}: is not TOML: {error}") from error
    table: dict[str, Any] | None = data.get("tool", {}).get("wholebatch", {}).get("lint")
    if table is not None and not isinstance(table, dict):
        raise OptionError(f"{file}: [tool.wholebatch.lint] must be a table")
    return table


def _codes(texts: Iterable[str], place: str) -> tuple[str, ...]:
    """Split codes and prefixes at commas; refuse a code that matches no rule."""
    known: Sequence[str] = [*OTHER_CODES, *(rule.code for rule in RULES)]
    codes = tuple(code.upper() for item in texts for code in item.replace(",", " ").split())
    for code in codes:
        if not any(k.startswith(code) for k in known):
            raise OptionError(
                f"{place}{code}: names no rule; codes are {RULES[0].code} to {RULES[-1].code}, "
                "or a prefix such as WB1"
            )
    return codes
