"""The command line: `wholebatch lint PATH...`, or `python -m wholebatch.lint` without torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .check_files import Finding, check_source, lint_files
from .lint_settings import SettingsError, load_settings
from .output_formats import FORMATS
from .rules import RULES
from .source_files import Source, collect

CLEAN, FOUND, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run once: findings go to standard output, everything else to standard error.

    Return 0 if clean (notes do not count), 1 with findings, 2 on wrong usage.
    """
    given = _parser().parse_args(argv)
    try:
        if given.explain is not None:
            print(_explanation(given.explain))
            return CLEAN
        if given.list_rules:
            print("\n".join(f"{rule.code} {rule.name}: {rule.summary}" for rule in RULES))
            return CLEAN
        return _lint(given)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND


def _lint(given: argparse.Namespace) -> int:
    for name, values in (("PATH", given.paths), ("--exclude", given.exclude)):
        if "" in values:
            raise SettingsError(f'{name} "": is empty; give a value (a variable that is not set?)')
    settings = load_settings(
        Path.cwd(), select=given.select, ignore=given.ignore, exclude=given.exclude
    )
    if "-" in given.paths:
        files = ["-"]
        findings = check_source(Source("-", sys.stdin.read()), settings)
    else:
        paths = given.paths or ["."]
        files = collect(paths, settings)
        if not files:
            print(f"warning: no script or notebook to read in {', '.join(paths)}", file=sys.stderr)
        findings = lint_files(files, settings)
    rendered = FORMATS[given.form](findings)
    if rendered:
        print(rendered)
    if given.form == "text" and files:
        print(_summary(findings, len(files)), file=sys.stderr)
    failed = any(f.level != "note" for f in findings) and not given.exit_zero
    return FOUND if failed else CLEAN


def _summary(findings: Sequence[Finding], files: int) -> str:
    found = f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"
    return f"{found} in {files} file{'' if files == 1 else 's'}"


def _explanation(code: str) -> str:
    """Return the docstring of a rule and the address of its page."""
    for rule in RULES:
        if rule.code == code.upper():
            return f"{rule.code}: {rule.name} ({rule.level})\n\n{rule.explanation}\n\n{rule.page}"
    codes = ", ".join(rule.code for rule in RULES)
    raise SettingsError(f"--explain {code}: no such rule; rules are {codes}")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        message = message.replace("ignored explicit argument", "takes no value, but was given")
        self.exit(USAGE, f"error: {message} (see --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="wholebatch lint",
        description="Find mistakes in gradient accumulation in training scripts and notebooks. "
        "The code is read, never imported or run.",
        epilog="Exit status: 0 clean (notes do not count), 1 findings, 2 wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="scripts, notebooks, folders, or - (default: .)"
    )
    parser.add_argument("--format", dest="form", default="text", choices=sorted(FORMATS))
    for name, metavar, about in (
        ("--select", "CODES", "check only these: WB101,WB103 or WB1"),
        ("--ignore", "CODES", "check all but these"),
        ("--exclude", "GLOB", "leave these paths out"),
    ):
        parser.add_argument(name, action="append", default=[], metavar=metavar, help=about)
    parser.add_argument("--exit-zero", action="store_true", help="exit with 0 despite findings")
    parser.add_argument("--explain", metavar="CODE", help="show what a rule finds, and its page")
    parser.add_argument("--list-rules", action="store_true", help="show all rules")
    return parser
