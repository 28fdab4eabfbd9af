"""Plain text as other linters print it: `file:line:col CODE message`, one line each."""

from __future__ import annotations

from collections.abc import Sequence

from ..findings import Finding

__all__ = ["as_text"]


def as_text(findings: Sequence[Finding]) -> str:
    """Return one line per finding; `[*]` marks those that `--fix` repairs."""
    return "\n".join(
        f"{f.place} {f.code} {'[*] ' if f.fix else ''}"
        f"{'note: ' if f.level == 'note' else ''}{f.message}"
        for f in findings
    )
