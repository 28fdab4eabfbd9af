"""Output formats of findings: text, JSON, SARIF and GitHub annotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..findings import Finding
from .github import github
from .json_list import as_json
from .plain_text import as_text
from .sarif import sarif

__all__ = ["FORMATS", "render"]

FORMATS: dict[str, Callable[[Sequence[Finding]], str]] = {
    "text": as_text,
    "json": as_json,
    "sarif": sarif,
    "github": github,
}


def render(findings: Sequence[Finding], form: str) -> str:
    """Return the findings in a format, without a trailing newline."""
    return FORMATS[form](findings)
