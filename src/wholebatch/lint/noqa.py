"""Suppression comments: `# noqa` and `# noqa: WB101, WB103`."""

from __future__ import annotations

import re

__all__ = ["is_silenced"]

_NOQA = re.compile(
    r"#\s*noqa(?P<codes>\s*:\s*(?P<list>[A-Za-z]+\d+(?:[,\s]+[A-Za-z]+\d+)*))?", re.IGNORECASE
)


def is_silenced(lines: list[str], first: int, last: int, code: str) -> bool:
    """True if a `noqa` on one of these lines (counted from 1) suppresses the code."""
    for number in range(first, min(last, len(lines)) + 1):
        line = lines[number - 1]
        if "noqa" not in line.lower():
            continue
        match = _NOQA.search(line)
        if match is None:
            continue
        if match.group("list") is None:
            return True
        if code.upper() in re.split(r"[,\s]+", match.group("list").upper()):
            return True
    return False
