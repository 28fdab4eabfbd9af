"""Output formats of findings: text, JSON and GitHub annotations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from .check_files import Finding

_GITHUB_LEVELS = {"error": "error", "unread": "error", "note": "notice"}


def as_text(findings: Sequence[Finding]) -> str:
    """Return each finding with its source line."""
    return "\n".join(map(_shown, findings))


def _shown(finding: Finding) -> str:
    level = "note: " if finding.level == "note" else ""
    return f"{finding.place} {finding.code} {level}{finding.message}{_excerpt(finding)}"


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
