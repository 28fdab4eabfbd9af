"""Settings of the linter: which rules, and which files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wholebatch.errors import OptionError

from .rules import RULES

# Codes of findings that no rule makes: a syntax error, an unreadable file, the note.
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

    def __post_init__(self) -> None:
        known: Sequence[str] = [*OTHER_CODES, *(rule.code for rule in RULES)]
        for code in (*self.select, *self.ignore):
            if not any(k.startswith(code) for k in known):
                raise OptionError(
                    f"{code}: names no rule (--select, --ignore); codes are {RULES[0].code} to "
                    f"{RULES[-1].code}, or a prefix such as WB1"
                )

    def wants(self, code: str) -> bool:
        """True if a code is to be reported; a prefix such as `WB1` stands for many."""
        is_selected = not self.select or code.startswith(self.select)
        return is_selected and not (self.ignore and code.startswith(self.ignore))

    def excludes(self, path: str) -> bool:
        """True if a path is excluded: it matches a pattern, or a part of it has the name."""
        here = Path(path)
        return any(here.match(pattern) or pattern in here.parts for pattern in self.exclude)


def codes(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the codes and prefixes of texts such as `WB101,WB103`."""
    return tuple(code.upper() for item in texts for code in item.replace(",", " ").split())
