"""Output formats of findings: text, JSON and GitHub annotations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from .check_files import Finding

_GITHUB_LEVELS = {"note": "notice", "warning": "warning", "error": "error"}


def as_text(findings: Sequence[Finding]) -> str:
    """Return each finding with its source line."""
    return "\n".join(
        f"{f.place} {f.code} {'note: ' if f.level == 'note' else ''}{f.message}{_excerpt(f)}"
        for f in findings
    )


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


FORMATS: dict[str, Callable[[Sequence[Finding]], str]] = {
    "text": as_text,
    "json": as_json,
    "github": as_github,
}
