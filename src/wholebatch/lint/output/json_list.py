"""A JSON list, one object per finding."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..findings import Finding

__all__ = ["as_json"]


def as_json(findings: Sequence[Finding]) -> str:
    """Return JSON with stable keys.

    The keys are code, name, level, message, path, cell, line, column, end_line, fixable.
    """
    rows = [
        {
            "code": f.code,
            "name": f.name,
            "level": f.level,
            "message": f.message,
            "path": f.path,
            "cell": f.cell,
            "line": f.line,
            "column": f.column,
            "end_line": f.end_line,
            "fixable": bool(f.fix),
        }
        for f in findings
    ]
    return json.dumps(rows, indent=2)
