"""Plain text for a terminal of any width: no word is split. Needs nothing but Python."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from textwrap import wrap


def columns() -> int:
    return shutil.get_terminal_size().columns


def described_rows(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Return names with their descriptions beside them, or below where a name is long."""
    indent = min(28, max(len(name) for name, _ in rows) + 4, width // 3)
    lines = []
    for name, text in rows:
        described = wrapped(text, width, " " * indent)
        if len(name) + 4 > indent:
            lines += wrapped(name, width, "  ")
        else:
            described[0] = f"  {name:<{indent - 2}}{described[0].lstrip()}"
        lines += described
    return lines


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the text in lines of at most `width` columns, without splitting a word."""
    return wrap(
        " ".join(text.split()),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def command_lines(text: str, width: int, indent: str = "  ") -> list[str]:
    """Return a command line for copying: a shell's continuation where it is too long.

    >>> print("\\n".join(command_lines("wholebatch train --out runs/one", 24)))
      wholebatch train \\
        --out runs/one
    """
    first, *parts = re.split(r" (?=[->|])", text)
    lines = [indent + first]
    for place, part in enumerate(parts, 1):
        room = width - (0 if place == len(parts) else 2)  # a continuation needs two columns
        if len(lines[-1]) + 1 + len(part) <= room:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"{indent}  {part}")
    return lines


def bold(text: str) -> str:
    """Return the text as a heading, in bold on a terminal."""
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[1m{text}\x1b[0m"
