"""SARIF 2.1.0, the format of code-scanning services."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from ..findings import Finding
from ..rules import RULES

__all__ = ["sarif"]


def sarif(findings: Sequence[Finding]) -> str:
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
    cell = f" (cell {finding.cell})" if finding.cell is not None else ""
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "level": finding.level,
        "message": {"text": finding.message + cell},
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
