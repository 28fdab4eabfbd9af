"""Check files: return the findings that no `# noqa` silences."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .lint_settings import Settings
from .rules import RULES, not_understood
from .rules.rule_base import ERROR, NOTE, Report
from .source_files import Source, read_source
from .windows import read

_SYNTAX = "WB001"
_UNREAD = "WB002"
_NOT_UNDERSTOOD = "WB003"
UNREAD = "unread"
"""The level of a file that could not be checked, beside those of the rules: error and note."""

# A file without a backward, a step function or a trainer cannot accumulate. In a folder, it is not
# parsed; a file that is named is, so that its syntax errors are found.
_TRAINS = re.compile(
    r"backward\s*\(|loss_scaler\s*\(|def (training_step|compute_loss)\b|Train(er|ingArguments)\("
    r"|GradientTape\("
)
_NOQA = re.compile(r"#\s*noqa(?:\s*:\s*(?P<codes>[A-Z]+\d+(?:[,\s]+[A-Z]+\d+)*))?", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Finding:
    """One finding. `cell` is the notebook's cell, counted from 1, or None in a script."""

    path: str
    line: int
    column: int
    code: str
    message: str
    level: str = ERROR
    name: str = ""
    cell: int | None = None
    end_line: int | None = None
    end_column: int | None = None
    source_line: str = ""

    @property
    def place(self) -> str:
        """Return `file:line:col`, or `notebook:cell N:line:col`."""
        cell = f"cell {self.cell}:" if self.cell is not None else ""
        return f"{self.path}:{cell}{self.line}:{self.column}"


def lint_files(
    files: Sequence[str], settings: Settings, *, named: Collection[str] = ()
) -> list[Finding]:
    """Return the findings of all files, in the order of the files.

    Files that are `named` are always parsed. An internal error is a finding too: the other files
    are still checked.
    """
    findings: list[Finding] = []
    for path in files:
        gc.disable()  # A syntax tree is needed to the end of its file: there is nothing to collect.
        try:
            findings += check_source(read_source(path), settings, is_named=path in named)
        except Exception as error:
            why = f"could not be checked ({type(error).__name__}: {error}); please report this file"
            findings.append(Finding(path, 1, 1, _UNREAD, why, UNREAD))
        finally:
            gc.enable()
    return findings


def check_source(source: Source, settings: Settings, *, is_named: bool = True) -> list[Finding]:
    """Return the findings of one file in line order; problems with the file are findings too."""
    findings = []
    for problem in source.problems:
        code = _SYNTAX if problem.message.startswith("syntax error") else _UNREAD
        place = (source.path, problem.line, problem.column)
        findings.append(Finding(*place, code, problem.message, UNREAD, cell=problem.cell))
    if is_named or _TRAINS.search(source.text):
        findings += _parse_and_check(source, settings)
    findings = [f for f in findings if f.level == UNREAD or settings.wants(f.code)]
    return sorted(set(findings), key=lambda f: (f.cell or 0, f.line, f.column, f.code))


def _parse_and_check(source: Source, settings: Settings) -> list[Finding]:
    try:
        file = read(source.text)
    except SyntaxError as error:
        place = (source.path, error.lineno or 1, error.offset or 1)
        return [Finding(*place, _SYNTAX, f"syntax error: {error.msg}", UNREAD)]
    except (ValueError, RecursionError, MemoryError) as error:
        return [Finding(source.path, 1, 1, _UNREAD, f"cannot be parsed: {error}", UNREAD)]
    lines = source.text.split("\n")
    findings: list[Finding] = []
    for rule in RULES:
        if settings.wants(rule.code):
            places: set[tuple[int, int]] = set()
            for report in rule.check(file):
                finding = _finding(report, rule.code, rule.name, source, lines)
                # The first finding of a rule at each place.
                if finding is not None and (finding.line, finding.column) not in places:
                    places.add((finding.line, finding.column))
                    findings.append(finding)
    note = None if findings or not settings.wants(_NOT_UNDERSTOOD) else not_understood(file)
    if note is not None:
        finding = _finding(note, _NOT_UNDERSTOOD, "loop not understood", source, lines)
        findings += [] if finding is None else [finding]
    return findings


def _finding(
    report: Report, code: str, name: str, source: Source, lines: list[str]
) -> Finding | None:
    """Return the finding of a report, or None if a comment silences it."""
    line, column, end, end_column = _position(report.node, lines)
    if _is_silenced(lines, line, end, code):
        return None
    cell, inside = source.place(line)
    tells = f"; `wholebatch verify {source.path}` tells" if report.level == NOTE else ""
    return Finding(
        source.path,
        inside,
        column,
        code,
        report.message + tells,
        report.level,
        name,
        cell,
        end_line=end - line + inside,
        end_column=end_column,
        source_line=lines[line - 1] if line <= len(lines) else "",
    )


def _position(node: ast.AST, lines: list[str]) -> tuple[int, int, int, int | None]:
    """Return line, column, last line, and the column behind a node that ends on its first line."""
    line = int(getattr(node, "lineno", 1))
    column = _column(lines, line, int(getattr(node, "col_offset", 0)))
    # Report the first line of a compound statement, not its whole body.
    if isinstance(node, ast.stmt) and hasattr(node, "body"):
        return line, column, line, None
    last, end = getattr(node, "end_lineno", None) or line, getattr(node, "end_col_offset", None)
    return line, column, last, None if end is None or last != line else _column(lines, line, end)


def _column(lines: list[str], line: int, offset: int) -> int:
    """Return the column in characters, counted from 1, of an offset in bytes of UTF-8."""
    text = lines[line - 1] if line <= len(lines) else ""
    return len(text.encode()[:offset].decode(errors="ignore")) + 1


def _is_silenced(lines: list[str], first: int, last: int, code: str) -> bool:
    """True if `# noqa` or `# noqa: WB101, WB103` on one of the lines (from 1) names the code."""
    for line in lines[first - 1 : last]:
        match = _NOQA.search(line)
        if match is None:
            continue
        codes = match.group("codes")
        if codes is None or code in codes.upper().replace(",", " ").split():
            return True
    return False
