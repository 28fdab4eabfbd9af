"""GitHub workflow commands, shown beside the lines of a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from ..findings import Finding

__all__ = ["github"]

_COMMANDS = {"note": "notice", "warning": "warning", "error": "error"}


def github(findings: Sequence[Finding]) -> str:
    """Return one workflow command per finding."""
    return "\n".join(
        f"::{_COMMANDS[f.level]} title=wholebatch {f.code},file={_property(f.path)},"
        f"line={f.line},col={f.column}::{_data(_message(f))}"
        for f in findings
    )


def _message(finding: Finding) -> str:
    where = f" (cell {finding.cell})" if finding.cell is not None else ""
    return f"{finding.code}{where} {finding.message}"


def _data(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")
