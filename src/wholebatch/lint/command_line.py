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

from .check_files import Finding, lint_files
from .lint_settings import SettingsError, load_settings
from .output_formats import FORMATS
from .rules import RULES
from .source_files import collect

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
    try:
        files = collect(options.paths, settings)
    except FileNotFoundError as error:
        raise UsageError(f"{error}: no such file or folder") from error
    findings = lint_files(files, settings, jobs=options.jobs)
    repaired = 0
    if options.fix and any(f.fix for f in findings):
        try:
            from .fix import fix_files
        except ImportError as error:
            raise UsageError("--fix needs libcst: pip install libcst") from error
        repaired = fix_files(findings, settings)
        findings = lint_files(files, settings, jobs=options.jobs)
    rendered = FORMATS[options.form](findings)
    is_screen = options.form == "text" and options.output is None and sys.stdout.isatty()
    _write(_wrapped(rendered) if is_screen else rendered, options.output)
    if options.form == "text":
        print(_summary(files, findings, repaired), file=sys.stderr)
    return FOUND if any(f.level != "note" for f in findings) else CLEAN


def _refuse_wrong(options: LintArguments) -> None:
    if not options.paths:
        raise UsageError("no paths given: name files or folders, for example `wholebatch lint .`")
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


def _summary(files: Sequence[str], findings: Sequence[Finding], repaired: int) -> str:
    fixable = sum(1 for f in findings if f.fix)
    words = f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"
    words += f" in {len(files)} file{'' if len(files) == 1 else 's'}"
    if repaired:
        words += f", {repaired} fixed"
    if fixable:
        words += f", {fixable} fixable with --fix"
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
    parser.add_argument("paths", nargs="*", metavar="PATH", help="scripts, notebooks or folders")
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
    parser.add_argument("--explain", metavar="CODE", help="show the page of a rule")
    parser.add_argument("--list-rules", action="store_true", help="show all rules")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: all cores)")
    parser.add_argument("--output", metavar="FILE", help="write the findings to a file")
    return parser
