"""`file:line:col CODE message`, one line each, as the linters people know."""

from __future__ import annotations

from collections.abc import Sequence

from ..findings import Finding

__all__ = ["as_text"]


def as_text(findings: Sequence[Finding]) -> str:
    """One line per finding; a `[*]` marks those that `--fix` repairs."""
    return "\n".join(
        f"{f.place} {f.code} {'[*] ' if f.fix else ''}"
        f"{'note: ' if f.level == 'note' else ''}{f.message}"
        for f in findings
    )
