"""The check of one file: its source in, its findings out."""

from __future__ import annotations

import ast
import re

from .findings import Finding
from .lint_settings import Settings
from .model import read
from .noqa import is_silenced
from .rules import RULES
from .script_source import Source, read_source

__all__ = ["SYNTAX", "UNREAD", "check_file", "check_source", "may_matter"]

SYNTAX = "WB001"
UNREAD = "WB002"

# A file without a backward, a step function or a Trainer subclass cannot accumulate.
_TRAINS = re.compile(r"backward\s*\(|loss_scaler\s*\(|def (training_step|compute_loss)\b")
_UPDATES = re.compile(
    r"\.\s*step\s*\(|optimizer_step|update_grad|def (training_step|compute_loss)\b|loss_scaler"
)


def may_matter(text: str) -> bool:
    """True if the text may contain a training loop. This cheap test avoids parsing most files."""
    return bool(_TRAINS.search(text)) and bool(_UPDATES.search(text))


def check_file(path: str, settings: Settings) -> list[Finding]:
    """Return the findings of one file in line order; problems with the file are findings too."""
    source = read_source(path, max_bytes=settings.max_file_bytes)
    return check_source(source, settings)


def check_source(source: Source, settings: Settings) -> list[Finding]:
    """Return the findings of a text that is already in memory."""
    found = [
        Finding(
            source.path,
            p.line,
            p.column,
            SYNTAX if p.message.startswith("syntax error") else UNREAD,
            p.message,
            "error",
            cell=p.cell,
        )
        for p in source.problems
    ]
    if may_matter(source.text):
        found += _rules(source, settings)
    found = [f for f in found if settings.wants_in(f.code, source.path)]
    return sorted(set(found), key=lambda f: (f.cell or 0, f.line, f.column, f.code))


def _rules(source: Source, settings: Settings) -> list[Finding]:
    try:
        file = read(source.text)
    except SyntaxError as error:
        words = f"syntax error: {error.msg}"
        return [Finding(source.path, error.lineno or 1, error.offset or 1, SYNTAX, words, "error")]
    except (ValueError, RecursionError, MemoryError) as error:
        return [Finding(source.path, 1, 1, UNREAD, f"cannot be parsed: {error}", "error")]
    lines = source.text.split("\n")
    found: dict[tuple[str, int, int], Finding] = {}
    for rule in RULES:
        if not settings.wants_in(rule.code, source.path):
            continue
        for report in rule.check(file):
            line, column, end = _position(report.node)
            if is_silenced(lines, line, end, rule.code):
                continue
            cell, inside = source.place(line)
            finding = Finding(
                source.path,
                inside,
                column,
                rule.code,
                report.message,
                rule.level,
                rule.name,
                cell,
                end - line + inside,
                report.fix,
            )
            found.setdefault((rule.code, line, column), finding)
    return list(found.values())


def _position(node: ast.AST) -> tuple[int, int, int]:
    line = int(getattr(node, "lineno", 1))
    column = int(getattr(node, "col_offset", 0)) + 1
    end = int(getattr(node, "end_lineno", line) or line)
    # Report the first line of a compound statement, not its whole body.
    if isinstance(node, (ast.For, ast.While, ast.With, ast.AsyncWith, ast.If)):
        end = line
    return line, column, end
