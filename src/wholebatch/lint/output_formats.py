"""Output formats of findings: text, JSON and GitHub annotations."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import TextIO

from .check_files import Finding

_GITHUB_LEVELS = {"error": "error", "unread": "error", "note": "notice"}
_COLOURS = {"error": "31", "unread": "31", "note": "36"}


def as_text(findings: Sequence[Finding], stream: TextIO | None = None) -> str:
    """Return each finding with its source line; coloured and wrapped if it is for a terminal."""
    on_terminal = stream is not None and stream.isatty()
    coloured = on_terminal and os.environ.get("TERM") != "dumb"
    if "NO_COLOR" in os.environ or "FORCE_COLOR" in os.environ:
        coloured = "NO_COLOR" not in os.environ and stream is not None
    width = shutil.get_terminal_size().columns if on_terminal else 0
    return "\n".join(_shown(finding, width, coloured=coloured) for finding in findings)


def _shown(finding: Finding, width: int, *, coloured: bool) -> str:
    level = "note: " if finding.level == "note" else ""
    line = f"{finding.place} {finding.code} {level}{finding.message}"
    if width:
        line = textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False)
    if coloured:
        code = f"\033[{_COLOURS[finding.level]}m{finding.code}\033[0m"
        line = line.replace(finding.place, f"\033[1m{finding.place}\033[0m", 1)
        line = line.replace(finding.code, code, 1)
    return line + _excerpt(finding)


def _excerpt(finding: Finding) -> str:
    """Return the source line with carets under the finding."""
    line = finding.source_line.replace("\t", " ")
    shown = line.strip()
    if not shown:
        return ""
    start = finding.column - 1 - (len(line) - len(line.lstrip()))
    end = len(shown) if finding.end_column is None else start + finding.end_column - finding.column
    carets = " " * start + "^" * max(1, min(end, len(shown)) - start)
    return f"\n    | {shown}\n    | {carets}"


def as_json(findings: Sequence[Finding]) -> str:
    """Return a JSON list of findings."""
    keys = ("code", "name", "level", "message", "path", "cell", "line", "column", "end_line")
    return json.dumps([{key: getattr(f, key) for key in keys} for f in findings], indent=2)


def as_github(findings: Sequence[Finding]) -> str:
    """Return one workflow command per finding."""
    return "\n".join(
        f"::{_GITHUB_LEVELS[f.level]} title=wholebatch {f.code},"
        f"file={_escaped(f.path).replace(':', '%3A').replace(',', '%2C')},"
        f"line={f.line},col={f.column}::{_escaped(f.code + _cell(f) + ' ' + f.message)}"
        for f in findings
    )


def _cell(finding: Finding) -> str:
    return f" (cell {finding.cell})" if finding.cell is not None else ""


def _escaped(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def summary(findings: Sequence[Finding], files: int) -> str:
    """Return `2 findings in 1 of 7 files`."""
    notes = sum(finding.level == "note" for finding in findings)
    counted = _counted(len(findings) - notes, "finding")
    if notes:
        counted += f" and {_counted(notes, 'note')}"
    places = len({finding.path for finding in findings})
    of = f"{places} of " if places and files > 1 else ""
    return f"{counted} in {of}{_counted(files, 'file')}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


FORMATS: dict[str, Callable[[Sequence[Finding]], str]] = {
    "text": as_text,
    "json": as_json,
    "github": as_github,
}
