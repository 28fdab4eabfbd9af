"""Settings of the linter: the command line over `[tool.wholebatch.lint]` of pyproject.toml."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .rules import RULES

_ERROR_CODES = ("WB001", "WB002", "WB003")


class SettingsError(ValueError):
    """An invalid setting. The message says what is allowed."""


@dataclass(frozen=True)
class Settings:
    """Everything that changes which findings are reported."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    per_file_ignores: dict[str, tuple[str, ...]] = field(default_factory=dict)
    max_file_bytes: int = 2_000_000

    def wants(self, code: str) -> bool:
        """True if a code is to be reported; a prefix such as `WB1` selects many."""
        if any(code.startswith(prefix) for prefix in self.ignore):
            return False
        return not self.select or any(code.startswith(prefix) for prefix in self.select)

    def wants_in(self, code: str, path: str) -> bool:
        """True if `wants` holds and the code is not ignored for this file."""
        if not self.wants(code):
            return False
        return not any(
            any(code.startswith(p) for p in codes) and _matches(path, pattern)
            for pattern, codes in self.per_file_ignores.items()
        )

    def excludes(self, path: str) -> bool:
        """True if the path is excluded."""
        return any(_matches(path, pattern) for pattern in self.exclude)


def _matches(path: str, pattern: str) -> bool:
    here = Path(path)
    return here.match(pattern) or any(part == pattern for part in here.parts)


def load_settings(
    start: Path,
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> Settings:
    """Return the settings of the nearest pyproject.toml above `start`, plus the command line."""
    settings = _from_file(start)
    chosen = _codes(select, "select")
    if chosen:
        settings = replace(settings, select=chosen)
    return replace(
        settings,
        ignore=(*settings.ignore, *_codes(ignore, "ignore")),
        exclude=(*settings.exclude, *exclude),
    )


def _from_file(start: Path) -> Settings:
    folder = start.resolve()
    for parent in (folder, *folder.parents):
        file = parent / "pyproject.toml"
        if file.is_file():
            table = _table(file)
            return _parse(table, file) if table is not None else Settings()
    return Settings()


def _table(file: Path) -> dict[str, Any] | None:
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
        raise SettingsError(f"{file}: is not TOML: {error}") from error
    table = data.get("tool", {}).get("wholebatch", {}).get("lint")
    if table is not None and not isinstance(table, dict):
        raise SettingsError(f"{file}: [tool.wholebatch.lint] must be a table")
    return table


def _parse(table: dict[str, Any], file: Path) -> Settings:
    known = {f.name.replace("_", "-") for f in fields(Settings)}
    unknown = sorted(set(table) - known)
    if unknown:
        raise SettingsError(
            f"{file}: [tool.wholebatch.lint] has no setting {unknown[0]!r}; "
            f"it has {', '.join(sorted(known))}"
        )
    per_file = table.get("per-file-ignores", {})
    if not isinstance(per_file, dict):
        raise SettingsError(f"{file}: per-file-ignores must be a table of pattern = [codes]")
    limit = table.get("max-file-bytes", Settings.max_file_bytes)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit <= 0:
        raise SettingsError(f"{file}: max-file-bytes={limit!r}: must be a positive whole number")
    return Settings(
        select=_codes(_strings(table, "select", file), "select"),
        ignore=_codes(_strings(table, "ignore", file), "ignore"),
        exclude=tuple(_strings(table, "exclude", file)),
        per_file_ignores={
            str(k): _codes([v] if isinstance(v, str) else v, "per-file-ignores")
            for k, v in per_file.items()
        },
        max_file_bytes=limit,
    )


def _strings(table: dict[str, Any], name: str, file: Path) -> Sequence[str]:
    value = table.get(name, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise SettingsError(f"{file}: {name}={value!r}: must be a list of strings")
    return value


def _codes(given: Iterable[str], name: str) -> tuple[str, ...]:
    """Split codes and prefixes at commas; refuse one that matches no rule."""
    known = [rule.code for rule in RULES] + list(_ERROR_CODES)
    codes: list[str] = []
    for item in given:
        for code in re.split(r"[,\s]+", item.strip()):
            if not code:
                continue
            if code.upper() == "ALL":
                code = "WB"
            if not any(k.startswith(code.upper()) for k in known):
                raise SettingsError(
                    f"{name}={code!r}: names no rule; codes are {known[0]} to {RULES[-1].code}, "
                    "or a prefix such as WB1"
                )
            codes.append(code.upper())
    return tuple(codes)
