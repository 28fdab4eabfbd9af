"""Output formats of findings: text, JSON, SARIF and GitHub annotations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from .check_files import Finding
from .rules import RULES


def as_text(findings: Sequence[Finding]) -> str:
    """Return each finding with its source line; `[*]` marks those that `--fix` repairs."""
    return "\n".join(
        f"{f.place} {f.code} {'[*] ' if f.fix and not f.unsafe else ''}"
        f"{'note: ' if f.level == 'note' else ''}{f.message}{_excerpt(f)}"
        for f in findings
    )


def _excerpt(finding: Finding) -> str:
    """Return the source line with carets under what is meant."""
    line = finding.source_line.replace("\t", " ")
    shown = line.strip()
    if not shown:
        return ""
    start = finding.column - 1 - (len(line) - len(line.lstrip()))
    end = len(shown) if finding.end_column is None else start + finding.end_column - finding.column
    marks = " " * start + "^" * max(1, min(end, len(shown)) - start)
    return f"\n    | {shown}\n    | {marks}"


def as_statistics(findings: Sequence[Finding]) -> str:
    """Return one line per rule: how often it was found, and how many of these have a fix."""
    counts = Counter(f.code for f in findings)
    fixable = Counter(f.code for f in findings if f.fix and not f.unsafe)
    names = {f.code: f.name for f in findings}
    return "\n".join(
        f"{count:5} {code} {'[*]' if fixable[code] else '   '} {names[code]}".rstrip()
        for code, count in counts.most_common()
    )


def as_json(findings: Sequence[Finding]) -> str:
    """Return JSON with stable keys: these of a finding, and `fixable`."""
    keys = ("code", "name", "level", "message", "path", "cell", "line", "column", "end_line")
    rows = [
        {key: getattr(f, key) for key in keys}
        | {"fixable": bool(f.fix) and not f.unsafe, "unsafe_fix": bool(f.fix) and f.unsafe}
        for f in findings
    ]
    return json.dumps(rows, indent=2)


_COMMANDS = {"note": "notice", "warning": "warning", "error": "error"}


def as_github(findings: Sequence[Finding]) -> str:
    """Return one workflow command per finding."""
    return "\n".join(
        f"::{_COMMANDS[f.level]} title=wholebatch {f.code},"
        f"file={_data(f.path).replace(':', '%3A').replace(',', '%2C')},"
        f"line={f.line},col={f.column}::{_data(f.code + _cell(f) + ' ' + f.message)}"
        for f in findings
    )


def _cell(finding: Finding) -> str:
    return f" (cell {finding.cell})" if finding.cell is not None else ""


def _data(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def as_sarif(findings: Sequence[Finding]) -> str:
    """Return one SARIF run with all rules and the findings as results."""
    indices = {rule.code: index for index, rule in enumerate(RULES)}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "wholebatch lint",
                        "rules": [
                            {
                                "id": rule.code,
                                "name": rule.name,
                                "helpUri": f"urn:wholebatch:lint:{rule.code}",
                                "shortDescription": {"text": rule.summary},
                                "fullDescription": {"text": rule.summary},
                                "help": {"text": rule.page, "markdown": rule.page},
                                "defaultConfiguration": {"level": rule.level},
                            }
                            for rule in RULES
                        ],
                    }
                },
                "results": [_result(f, indices) for f in findings],
            }
        ],
    }
    return json.dumps(log, indent=2)


def _result(finding: Finding, indices: dict[str, int]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "level": finding.level,
        "message": {"text": finding.message + _cell(finding)},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": PurePath(finding.path).as_posix()},
                    "region": {"startLine": finding.line, "startColumn": finding.column},
                }
            }
        ],
    }
    if finding.code in indices:
        result["ruleIndex"] = indices[finding.code]
    return result


FORMATS: dict[str, Callable[[Sequence[Finding]], str]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_github,
}
