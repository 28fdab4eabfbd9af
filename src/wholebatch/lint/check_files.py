"""The check of files: source in, findings out, without those that a `# noqa` silences."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from .lint_settings import Settings
from .model import File, read
from .rules import RULES, Rule
from .rules.rule_base import Edit, Report, trained_elsewhere
from .source_files import Source, read_source, without_wrong_lines

_SYNTAX = "WB001"
_UNREAD = "WB002"
_OTHER_FRAMEWORK = "WB003"

# A file without a backward, a step function or a Trainer subclass cannot accumulate.
_TRAINS = re.compile(
    r"backward\s*\(|loss_scaler\s*\(|def (training_step|compute_loss)\b|self\.training_step\("
)
_UPDATES = re.compile(
    r"\.\s*(step|optimize|zero_grad)\s*\(|optimizer_step|update_grad|loss_scaler"
    r"|(step|update)\w*\([^)\n]*optim"
    r"|def (training_step|compute_loss)\b"
)
# The loop is in a framework, and perhaps the loss in another module.
_TRAINER = re.compile(r"Train(er|ingArguments)\(")
_SET = re.compile(r"\b(accumulate_grad_batches|gradient_accumulation_steps)\s*=")
# Loops that other rules than those of torch read, or none does.
_ELSEWHERE = re.compile(
    r"^[ \t]*(?:import|from)[ \t]+(tensorflow|keras|jax|flax|mlx|paddle)\b", re.M
)
_ACCUMULATES = re.compile(
    r"MultiSteps\s*\(|gradient_accumulation_steps\s*=|accum\w*_?(grad|step|iter|batch)"
    r"|grad\w*_?ac+um|(num|n)_ac+um|assign_add\(\s*\w*grad",
    re.I,
)
_APPLIES = re.compile(
    r"apply_gradients\s*\(|optimizer\.apply\s*\(|apply_updates\s*\(|MultiSteps\s*\(|optimizers\.\w+\("
)
_SPOILS = {"WB103", "WB113", "WB114", "WB120", "WB121"}
# By their form, whatever the names are: sums, and an update that is made now and then.
_SUMS = re.compile(
    r"\[\s*(\w+)\s*\+\s*(\w+)\b[^]\n]*\sfor\s+\(?\1\s*,\s*\2\b|\.assign_add\(|\w\]\s*\+="
    r"|tree_?(?:util\.tree_)?\.?map\(\s*(?:lambda (\w+), (\w+): \3 \+ \4|\w+\.add\b)"
)
_NOW_AND_THEN = re.compile(
    r"\btf\.cond\(|\bif\b[^\n]*%[^\n]*:\s*\n(?:[^\n]*\n){0,5}?[^\n]*(apply_gradients|\.apply|apply_updates)\s*\("
)
_NOQA = re.compile(r"#\s*noqa(?:\s*:\s*(?P<codes>[A-Z]+\d+(?:[,\s]+[A-Z]+\d+)*))?", re.IGNORECASE)
# Starting workers takes about as long as checking this many files.
_ALONE = 64
_CHUNK = 32


@dataclass(frozen=True, order=True)
class Finding:
    """One finding. `cell` is the notebook's cell, counted from 1, or None in a script."""

    path: str
    line: int
    column: int
    code: str
    message: str
    level: str = "warning"
    name: str = ""
    cell: int | None = None
    end_line: int | None = None
    end_column: int | None = None
    fix: tuple[Edit, ...] = ()
    unsafe: bool = False
    source_line: str = ""

    @property
    def place(self) -> str:
        """Return `file:line:col`, or `notebook:cell N:line:col`."""
        cell = f"cell {self.cell}:" if self.cell is not None else ""
        return f"{self.path}:{cell}{self.line}:{self.column}"


def lint_files(
    files: Sequence[str], settings: Settings, *, jobs: int | None = None
) -> list[Finding]:
    """Return the findings of all files, in the order of the files."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(jobs or cores or 1, max(1, len(files) // _CHUNK))
    if workers <= 1 or (jobs is None and len(files) < _ALONE):
        return _check_chunk(files, settings)
    context = multiprocessing.get_context(_start_method())
    chunks = [files[i : i + _CHUNK] for i in range(0, len(files), _CHUNK)]
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        results = pool.map(_check_chunk, chunks, [settings] * len(chunks))
        return [finding for chunk in results for finding in chunk]


def _start_method() -> str:
    """Return the start method of workers: fork is fastest, but unsafe with threads or torch."""
    if sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules:
        return "fork"
    return "spawn" if os.name == "nt" else "forkserver"


def _check_chunk(files: Sequence[str], settings: Settings) -> list[Finding]:
    """Check files; report an internal error as a finding and go on."""
    found: list[Finding] = []
    for path in files:
        try:
            source = read_source(path, max_bytes=settings.max_file_bytes)
            found += check_source(source, settings)
        except Exception as error:
            why = f"could not be checked ({type(error).__name__}: {error}); please report this file"
            found.append(Finding(path, 1, 1, _UNREAD, why, "error"))
    return found


def check_source(source: Source, settings: Settings) -> list[Finding]:
    """Return the findings of one file in line order; problems with the file are findings too."""
    found = []
    for problem in source.problems:
        code = _SYNTAX if problem.message.startswith("syntax error") else _UNREAD
        place = (source.path, problem.line, problem.column)
        found.append(Finding(*place, code, problem.message, "error", cell=problem.cell))
    # A cheap test that avoids parsing most files.
    text = source.text
    trained = _TRAINER.search(text) and _SET.search(text) and not _ELSEWHERE.search(text)
    if trained or (_TRAINS.search(text) and _UPDATES.search(text)):
        found += _parse_and_check(source, settings)
    else:
        found += _of_another_framework(source, settings)
    found = [f for f in found if settings.wants_in(f.code, source.path)]
    return sorted(set(found), key=lambda f: (f.cell or 0, f.line, f.column, f.code))


def _of_another_framework(source: Source, settings: Settings) -> list[Finding]:
    """Check the few things that are known of other frameworks, and say once what was not read."""
    framework = _ELSEWHERE.search(source.text)
    text = source.text
    if framework is None or not (
        (_ACCUMULATES.search(text) and (_APPLIES.search(text) or "GradientTape" in text))
        or (_SUMS.search(text) and _NOW_AND_THEN.search(text))
    ):
        return []
    words = (
        f"this file accumulates gradients with {framework.group(1)}, whose loops the rules read "
        "only in part: hold an update against that of the whole batch yourself"
    )
    line = source.text.count("\n", 0, framework.end()) + 1
    cell, inside = source.place(line)
    note = Finding(source.path, inside, 1, _OTHER_FRAMEWORK, words, "note", cell=cell)
    # Mended loops are run in tests with torch alone.
    found = [replace(f, fix=(), unsafe=False) for f in _parse_and_check(source, settings)]
    return [note, *found]


def _parse_and_check(source: Source, settings: Settings) -> list[Finding]:
    try:
        file = read(source.text, source.path)
    except SyntaxError as error:
        words, rest = f"syntax error: {error.msg}", without_wrong_lines(source.text)
        place = (source.path, error.lineno or 1, error.offset or 1)
        if rest is None:
            return [Finding(*place, _SYNTAX, words, "error")]
        found = _parse_and_check(replace(source, text=rest), settings)
        words += " (the other lines are read)"
        return [
            Finding(*place, _SYNTAX, words, "error"),
            *(replace(one, fix=(), unsafe=False) for one in found),
        ]
    except (ValueError, RecursionError, MemoryError) as error:
        return [Finding(source.path, 1, 1, _UNREAD, f"cannot be parsed: {error}", "error")]
    lines = source.text.split("\n")
    files = [(file, None), *trained_elsewhere(file)]
    found = [
        finding
        for rule in RULES
        if settings.wants_in(rule.code, source.path)
        for finding in _check_rule(rule, files, source, lines)
    ]
    # Beside these no mended loop makes the update of the whole batch.
    spoils = [rule for rule in RULES if rule.code in _SPOILS]
    if any(f.fix for f in found) and any(next(rule.check(file), None) for rule in spoils):
        return [replace(f, fix=(), unsafe=False) for f in found]
    return found


def _check_rule(
    rule: Rule, files: list[tuple[File, ast.AST | None]], source: Source, lines: list[str]
) -> list[Finding]:
    """Return the first finding of a rule at each place."""
    found: dict[tuple[int, int], Finding] = {}
    # What is wrong in another module is reported where the file names it.
    for report, where in ((r, where) for file, where in files for r in rule.check(file)):
        report = report if where is None else Report(where, report.message)
        line, column, end, end_column = _position(report.node)
        if _is_silenced(lines, line, end, rule.code):
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
            end_line=end - line + inside,
            end_column=end_column,
            fix=report.fix if all(e.line for e in report.fix) else (),
            unsafe=report.unsafe,
            source_line=lines[line - 1] if line <= len(lines) else "",
        )
        found.setdefault((line, column), finding)
    return list(found.values())


def _position(node: ast.AST) -> tuple[int, int, int, int | None]:
    """Return line, column, last line, and the column behind a node that ends on its first line."""
    line = int(getattr(node, "lineno", 1))
    column = int(getattr(node, "col_offset", 0)) + 1
    # Report the first line of a compound statement, not its whole body.
    if isinstance(node, (ast.For, ast.While, ast.With, ast.AsyncWith, ast.If)):
        return line, column, line, None
    last, end = getattr(node, "end_lineno", None) or line, getattr(node, "end_col_offset", None)
    return line, column, last, end + 1 if end is not None and last == line else None


def _is_silenced(lines: list[str], first: int, last: int, code: str) -> bool:
    """True if `# noqa` or `# noqa: WB101, WB103` on one of the lines (from 1) names the code."""
    for line in lines[first - 1 : last]:
        match = _NOQA.search(line)
        if match is None:
            continue
        codes = match.group("codes")
        if codes is None or code in re.split(r"[,\s]+", codes.upper()):
            return True
    return False
