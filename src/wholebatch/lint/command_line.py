"""The command line that needs only Python: `python -m wholebatch.lint PATH...`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .check_files import Finding, check_source, lint_files
from .lint_settings import Settings, SettingsError, load_settings
from .output_formats import FORMATS, as_statistics
from .rules import RULES
from .source_files import Source, collect

CLEAN, FOUND, USAGE = 0, 1, 2


class UsageError(ValueError):
    """Wrong usage of the command line. The message says what is allowed."""


@dataclass(frozen=True)
class LintArguments:
    """The options of one run."""

    paths: Sequence[str] = ()
    form: str = "text"
    select: Sequence[str] = ()
    ignore: Sequence[str] = ()
    exclude: Sequence[str] = ()
    fix: bool = False
    explain: str | None = None
    list_rules: bool = False
    jobs: int | None = None
    output: str | None = None
    unsafe_fixes: bool = False
    diff: bool = False
    statistics: bool = False
    exit_zero: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run; return 0 if clean, 1 with findings, 2 on wrong usage."""
    try:
        return run(LintArguments(**vars(_parser().parse_args(argv))))
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND


def run(options: LintArguments) -> int:
    """Run once. Findings go to standard output, everything else to standard error."""
    try:
        if options.explain is not None:
            return _explain(options.explain)
        if options.list_rules:
            for rule in RULES:
                print(f"{rule.code} {rule.name}: {rule.summary}")
            return CLEAN
        return _lint(options)
    except (SettingsError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


def _lint(options: LintArguments) -> int:
    _refuse_wrong(options)
    settings = load_settings(
        Path.cwd(), select=options.select, ignore=options.ignore, exclude=options.exclude
    )
    if "-" in options.paths:
        return _lint_input(options, settings)
    paths = options.paths or ["."]
    files = collect(paths, settings)
    if not files:
        print(f"warning: no script or notebook to read in {', '.join(paths)}", file=sys.stderr)
    findings = lint_files(files, settings, jobs=options.jobs)
    repaired = 0
    if options.diff:
        changes = "".join(_fixing().diff_files(findings, settings, unsafe=options.unsafe_fixes))
        _write(changes.rstrip("\n"), options.output)
        return FOUND if changes and not options.exit_zero else CLEAN
    if options.fix and any(f.fix for f in findings):
        try:
            repaired = _fixing().fix_files(findings, settings, unsafe=options.unsafe_fixes)
        except OSError as error:
            raise UsageError(f"--fix: {error.strerror}; no file is half written") from error
        findings = lint_files(files, settings, jobs=options.jobs)
    return _report(options, findings, len(files), repaired)


def _lint_input(options: LintArguments, settings: Settings) -> int:
    """Check standard input; with `--fix`, write the repaired text to standard output."""
    text = sys.stdin.read()
    if options.fix or options.diff:
        fixed, _ = _fixing().fix_text(text, settings, path="-", unsafe=options.unsafe_fixes)
        shown = _fixing().diff_text("-", text, fixed) if options.diff else fixed
        sys.stdout.write(shown)
        return CLEAN if options.exit_zero or not options.diff or not shown else FOUND
    return _report(options, check_source(Source("-", text), settings), 1, 0)


def _report(options: LintArguments, findings: Sequence[Finding], files: int, repaired: int) -> int:
    """Write the findings in the format that was asked for, and return the exit status."""
    shown = as_statistics if options.statistics else FORMATS[options.form]
    rendered = shown(findings)
    is_screen = options.form == "text" and options.output is None and sys.stdout.isatty()
    _write(_wrapped(rendered) if is_screen else rendered, options.output)
    if options.form == "text" and files:
        print(_summary(files, findings, repaired), file=sys.stderr)
    failed = any(f.level != "note" for f in findings) and not options.exit_zero
    return FOUND if failed else CLEAN


def _fixing() -> ModuleType:
    try:
        from . import fix
    except ImportError as error:
        raise UsageError("--fix and --diff need libcst: pip install libcst") from error
    return fix


def _refuse_wrong(options: LintArguments) -> None:
    if options.form not in FORMATS:
        raise UsageError(f"format={options.form!r}: must be one of {', '.join(FORMATS)}")
    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"jobs={options.jobs}: must be at least 1")


def _write(rendered: str, output: str | None) -> None:
    if output is None:
        if rendered:
            print(rendered)
        return
    try:
        Path(output).write_text(rendered + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"output={output!r}: cannot be written: {error.strerror}") from error


def _wrapped(rendered: str) -> str:
    """Return the text for a terminal: lines are broken between words, the rest is indented."""
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(
            line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        for line in rendered.splitlines()
    )


def _summary(files: int, findings: Sequence[Finding], repaired: int) -> str:
    fixable = sum(1 for f in findings if f.fix and not f.unsafe)
    unsafe = sum(1 for f in findings if f.fix and f.unsafe)
    words = f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"
    words += f" in {files} file{'' if files == 1 else 's'}"
    if repaired:
        words += f", {repaired} fixed"
    if fixable:
        words += f", {fixable} fixable with --fix"
    if unsafe:
        words += f", {unsafe} more with --unsafe-fixes"
    return words


def _explain(code: str) -> int:
    for rule in RULES:
        if rule.code == code.upper():
            print(rule.page)
            return CLEAN
    codes = ", ".join(rule.code for rule in RULES)
    raise UsageError(f"explain={code!r}: no such rule; rules are {codes}")


def _parser() -> argparse.ArgumentParser:
    package = (__package__ or "wholebatch.lint").replace("_", "-")
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__ or package}",
        description="Find mistakes of gradient accumulation in training scripts and notebooks.",
        epilog="Exit status: 0 clean (notes do not count), 1 findings, 2 wrong usage.",
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="scripts, notebooks, folders, or - (default: .)"
    )
    parser.add_argument("--format", dest="form", default="text", choices=sorted(FORMATS))
    parser.add_argument(
        "--select", action="append", default=[], metavar="CODES", help="only these (WB101,WB103)"
    )
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="CODES", help="all but these"
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="leave these paths out"
    )
    parser.add_argument("--fix", action="store_true", help="repair what is certain")
    parser.add_argument("--unsafe-fixes", action="store_true", help="and what is likely")
    parser.add_argument("--diff", action="store_true", help="show what --fix would change")
    parser.add_argument("--statistics", action="store_true", help="count the findings by rule")
    parser.add_argument("--exit-zero", action="store_true", help="exit with 0 despite findings")
    parser.add_argument("--explain", metavar="CODE", help="show the page of a rule")
    parser.add_argument("--list-rules", action="store_true", help="show all rules")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: all cores)")
    parser.add_argument("--output", metavar="FILE", help="write the findings to a file")
    return parser
